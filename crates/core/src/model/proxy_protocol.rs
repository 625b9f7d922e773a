//! The PROXY protocol, which tells endpoints the address of the client (`proxy-protocol.txt` of
//! HAProxy). The annotation `headgate.io/proxy-protocol` of a Service selects a version.

use std::fmt;

/// A version of the PROXY protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ProxyProtocol {
    /// A line of text.
    V1,
    /// A binary header.
    V2,
}

impl ProxyProtocol {
    /// All versions.
    pub const ALL: [Self; 2] = [Self::V1, Self::V2];

    /// Returns the value of the annotation.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V1 => "v1",
            Self::V2 => "v2",
        }
    }

    /// Returns the version with this name, or `None` if the name is unknown.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|version| version.as_str() == name)
    }
}

impl fmt::Display for ProxyProtocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
