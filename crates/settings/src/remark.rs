//! What is to say about one setting.

/// One sentence about one setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remark {
    /// The field, such as `ipvs.scheduler`, or the flag, such as `--ipvs-scheduler`.
    pub setting: String,
    /// Why the setting has no effect; or the problem with its value, and the remedy.
    pub what: String,
}

impl Remark {
    /// A remark about a setting.
    pub fn new(setting: impl Into<String>, what: impl Into<String>) -> Self {
        Self { setting: setting.into(), what: what.into() }
    }

    /// The text of a remark about a setting that has no effect.
    pub fn note(&self) -> String {
        format!("{} ({})", self.setting, self.what)
    }

    /// The text of a remark about a setting that cannot be used.
    pub fn problem(&self) -> String {
        format!("{}: {}", self.setting, self.what)
    }
}
