//! What a bench found.

use std::{fs, path::Path};

use anyhow::{Context as _, Result};
use serde::Serialize;

/// One figure, with what it is compared with.
#[derive(Debug, Clone, Serialize)]
pub struct Figure {
    /// Such as `iptables-full/legacy/10000x10`.
    pub name: String,
    /// The measured value.
    pub value: f64,
    /// Its unit, such as `ms` or `bytes`.
    pub unit: &'static str,
    /// What it is compared with, in words; empty when it stands alone.
    pub compared_with: String,
    /// The anchor's value in the same unit.
    pub anchor: Option<f64>,
    /// `value / anchor`: below 1 is better.
    pub ratio: Option<f64>,
}

impl Figure {
    /// A figure that stands alone.
    #[must_use]
    pub fn alone(name: impl Into<String>, value: f64, unit: &'static str) -> Self {
        Self { name: name.into(), value, unit, compared_with: String::new(), anchor: None, ratio: None }
    }

    /// A figure beside an anchor that was measured in the same run.
    #[must_use]
    pub fn against(
        name: impl Into<String>,
        value: f64,
        unit: &'static str,
        compared_with: impl Into<String>,
        anchor: f64,
    ) -> Self {
        let ratio = (anchor != 0.0).then_some(value / anchor);
        Self { name: name.into(), value, unit, compared_with: compared_with.into(), anchor: Some(anchor), ratio }
    }
}

/// Prints the figures of a bench and writes them to `folder/name.json`.
///
/// # Errors
/// When the file cannot be written.
pub fn publish(bench: &str, figures: &[Figure], folder: &Path) -> Result<()> {
    for figure in figures {
        print!("{:<44} {:>12.3} {:<6}", figure.name, figure.value, figure.unit);
        match (figure.anchor, figure.ratio) {
            (Some(anchor), Some(ratio)) => {
                println!("  ×{ratio:<8.4} of {}: {anchor:.3} {}", figure.compared_with, figure.unit);
            }
            _ => println!(),
        }
    }
    fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    let path = folder.join(format!("{bench}.json"));
    fs::write(&path, serde_json::to_string_pretty(figures)?).with_context(|| format!("writing {}", path.display()))
}

/// The middle one; of an even number, the upper of the two in the middle. 0 of none.
#[must_use]
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}
