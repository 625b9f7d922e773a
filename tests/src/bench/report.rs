//! The figures of a bench.

use std::{borrow::Cow, fs, path::Path};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

/// One figure, with its anchor if it has one.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Figure {
    /// The name, such as `iptables-full/legacy/10000x10`.
    pub name: String,
    /// The measured value.
    pub value: f64,
    /// The unit, such as `ms` or `bytes`.
    pub unit: Cow<'static, str>,
    /// A description of the anchor; empty without an anchor.
    pub compared_with: String,
    /// The anchor's value, in the figure's unit.
    pub anchor: Option<f64>,
    /// `value / anchor`. Less is better.
    pub ratio: Option<f64>,
    /// The highest value that meets the goal, if the figure has a goal.
    pub goal: Option<f64>,
}

impl Figure {
    /// A figure without an anchor.
    #[must_use]
    pub fn alone(name: impl Into<String>, value: f64, unit: &'static str) -> Self {
        Self {
            name: name.into(),
            value,
            unit: unit.into(),
            compared_with: String::new(),
            anchor: None,
            ratio: None,
            goal: None,
        }
    }

    /// A figure with an anchor from the same run.
    #[must_use]
    pub fn against(
        name: impl Into<String>,
        value: f64,
        unit: &'static str,
        compared_with: impl Into<String>,
        anchor: f64,
    ) -> Self {
        let ratio = (anchor != 0.0).then_some(value / anchor);
        Self {
            name: name.into(),
            value,
            unit: unit.into(),
            compared_with: compared_with.into(),
            anchor: Some(anchor),
            ratio,
            goal: None,
        }
    }

    /// The same figure with a goal: the highest value that meets it. The run of the benches fails
    /// if a figure misses its goal.
    #[must_use]
    pub fn with_goal(self, goal: f64) -> Self {
        Self { goal: Some(goal), ..self }
    }

    /// Whether the value is above the goal.
    #[must_use]
    pub fn misses_goal(&self) -> bool {
        self.goal.is_some_and(|goal| self.value > goal)
    }
}

/// Prints the figures of a bench, and writes them to the file `folder/NAME.json`, where NAME is the
/// value of `bench`.
///
/// # Errors
/// The file cannot be written.
pub fn publish(bench: &str, figures: &[Figure], folder: &Path) -> Result<()> {
    for figure in figures {
        print!("{:<56} {:>12.3} {:<6}", figure.name, figure.value, figure.unit);
        if let (Some(anchor), Some(ratio)) = (figure.anchor, figure.ratio) {
            print!("  ×{ratio:<8.4} of {}: {anchor:.3} {}", figure.compared_with, figure.unit);
        }
        if let Some(goal) = figure.goal {
            let verdict = if figure.misses_goal() { "MISSED" } else { "ok" };
            print!("  goal: at most {goal:.3}  {verdict}");
        }
        println!();
    }
    fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    let path = folder.join(format!("{bench}.json"));
    fs::write(&path, serde_json::to_string_pretty(figures)?).with_context(|| format!("writing {}", path.display()))
}

/// The median. For an even number of values, the median is the upper of the two middle values. The
/// median of no values is 0.
#[must_use]
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}
