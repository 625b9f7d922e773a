//! Values of settings: parses and formats them for flags and configuration files. A value is the
//! JSON that a configuration file contains; durations are texts such as `1m0s`.

use std::time::Duration;

use serde_json::Value as Json;

/// The kind of values that a setting accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `true` or `false`.
    Bool,
    /// A whole number from the first to the second bound, both included.
    Int(i64, i64),
    /// Text.
    Text,
    /// One of these texts. The comparison is case-sensitive.
    Choice(&'static [&'static str]),
    /// A list of texts; in a flag, separated by commas.
    List,
    /// A duration in Go's syntax: `1m0s`, `250ms`.
    Duration,
    /// Names and booleans; in a flag, `A=true,B=false`.
    Gates,
    /// Any value, without a check.
    Any,
}

impl Kind {
    /// The remedy for a wrong value, as the end of a message.
    pub fn expected(self) -> String {
        match self {
            Self::Bool => "write true or false".into(),
            Self::Int(i64::MIN, i64::MAX) => "write a whole number".into(),
            Self::Int(min, i64::MAX) => format!("write a whole number of at least {min}"),
            Self::Int(min, max) => format!("write a whole number from {min} to {max}"),
            Self::Text => "write text".into(),
            Self::Choice(choices) => {
                let choices: Vec<&str> = choices.iter().copied().filter(|choice| !choice.is_empty()).collect();
                format!("write one of {}", choices.join(", "))
            }
            Self::List => "write a list of texts".into(),
            Self::Duration => "write a duration such as 250ms, 30s, 1m0s or 24h".into(),
            Self::Gates => "write names with true or false, such as AllowServiceExternalIPs=false".into(),
            Self::Any => "write anything".into(),
        }
    }

    /// Parses the value of a flag.
    /// Errors: the value is not of this kind. The error contains the value and the remedy.
    pub fn parse(self, text: &str) -> Result<Json, String> {
        let value = match self {
            Self::Bool => parse_bool(text).map(Json::from),
            Self::Int(min, max) => {
                text.parse().ok().filter(|number: &i64| (min..=max).contains(number)).map(Json::from)
            }
            Self::Text => Some(Json::from(text)),
            Self::Choice(choices) => choices.contains(&text).then(|| Json::from(text)),
            Self::List => Some(text.split(',').map(str::trim).filter(|element| !element.is_empty()).collect()),
            Self::Duration => parse_duration(text).map(|duration| show_duration(duration).into()),
            Self::Gates => parse_gates(text),
            Self::Any => serde_json::from_str(text).ok().filter(Json::is_number).or_else(|| Some(Json::from(text))),
        };
        value.ok_or_else(|| format!("{text:?} cannot be used; {}", self.expected()))
    }

    /// Checks the value of a field in a file. Errors: the same errors as [`Self::parse`].
    pub fn from_json(self, json: &Json) -> Result<Json, String> {
        let is_valid = match (self, json) {
            (Self::Text | Self::Choice(_) | Self::Duration, Json::String(text)) => return self.parse(text),
            (Self::Any, _) | (Self::Bool, Json::Bool(_)) => true,
            (Self::Gates, Json::Object(gates)) => gates.values().all(Json::is_boolean),
            (Self::Int(min, max), json) => json.as_i64().is_some_and(|number| (min..=max).contains(&number)),
            (Self::List, Json::Array(elements)) => elements.iter().all(Json::is_string),
            _ => false,
        };
        if is_valid { Ok(json.clone()) } else { Err(format!("{json} cannot be used; {}", self.expected())) }
    }
}

/// A value as in a configuration file, without quotation marks around a text.
pub(super) fn shown(value: &Json) -> String {
    match value {
        Json::String(text) => text.clone(),
        Json::Array(list) => list.iter().map(shown).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    }
}

/// Parses a boolean like Go's `strconv.ParseBool`; `None` for any other text.
pub fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "true" | "True" | "TRUE" | "t" | "T" | "1" => Some(true),
        "false" | "False" | "FALSE" | "f" | "F" | "0" => Some(false),
        _ => None,
    }
}

fn parse_gates(text: &str) -> Option<Json> {
    let gates = text.split(',').map(str::trim).filter(|gate| !gate.is_empty());
    let pairs = gates.map(|gate| {
        let (name, value) = gate.split_once('=')?;
        Some((name.trim().to_owned(), Json::Bool(parse_bool(value.trim())?)))
    });
    pairs.collect::<Option<serde_json::Map<String, Json>>>().map(Json::Object)
}

/// Parses a duration like Go's `time.ParseDuration`: `0`, or numbers with units, such as `1h30m`,
/// `1.5h` or `250ms`. `None` for other texts and negative durations. Digits below a nanosecond may
/// lose a few nanoseconds.
pub fn parse_duration(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest.is_empty() {
        return None;
    }
    let mut sum = Duration::ZERO;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (number, tail) = rest.split_at(digits);
        let unit_end = tail.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit_end);
        let unit_nanoseconds: u64 = match unit {
            "ns" => 1,
            "us" | "µs" | "μs" => 1_000,
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            "m" => 60_000_000_000,
            "h" => 3_600_000_000_000,
            _ => return None,
        };
        sum = sum.checked_add(times(number, unit_nanoseconds)?)?;
        rest = tail;
    }
    // Go stores nanoseconds in 63 bits, so the longest duration is 292 years.
    (sum.as_nanos() <= i64::MAX.unsigned_abs().into()).then_some(sum)
}

/// Multiplies a decimal number by a unit, rounding down for each digit: at most 9 ns less than Go,
/// which rounds the sum.
fn times(number: &str, unit_nanoseconds: u64) -> Option<Duration> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return None;
    }
    let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let mut nanoseconds = u128::from(whole) * u128::from(unit_nanoseconds);
    let mut scale: u128 = u128::from(unit_nanoseconds);
    for digit in fraction.bytes() {
        scale /= 10;
        nanoseconds += u128::from(digit - b'0') * scale;
    }
    u64::try_from(nanoseconds).ok().map(Duration::from_nanos)
}

/// Formats a duration like Go: `1m0s`, `24h0m0s`, `250ms`, `0s`.
pub fn show_duration(duration: Duration) -> String {
    let in_units = |nanoseconds: u128, unit: u128, name: &str| {
        let (whole, rest) = (nanoseconds / unit, nanoseconds % unit);
        let width = unit.ilog10() as usize;
        let digits = format!("{rest:0width$}");
        let digits = digits.trim_end_matches('0');
        if rest == 0 { format!("{whole}{name}") } else { format!("{whole}.{digits}{name}") }
    };
    let nanoseconds = duration.as_nanos();
    let seconds = in_units(nanoseconds % 60_000_000_000, 1_000_000_000, "s");
    match (nanoseconds, duration.as_secs() / 3600, duration.as_secs() / 60 % 60) {
        (1..1_000, ..) => format!("{nanoseconds}ns"),
        (1_000..1_000_000, ..) => in_units(nanoseconds, 1_000, "µs"),
        (1_000_000..1_000_000_000, ..) => in_units(nanoseconds, 1_000_000, "ms"),
        (_, 0, 0) => seconds,
        (_, 0, minutes) => format!("{minutes}m{seconds}"),
        (_, hours, minutes) => format!("{hours}h{minutes}m{seconds}"),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn durations_are_parsed_like_in_go() {
        let milliseconds = |text: &str| parse_duration(text).map(|duration| duration.as_millis());
        for (text, expected) in [
            ("0", 0),
            ("0s", 0),
            ("250ms", 250),
            ("30s", 30_000),
            ("1m0s", 60_000),
            ("1h30m", 5_400_000),
            ("1.5h", 5_400_000),
            ("24h0m0s", 86_400_000),
            (".5s", 500),
        ] {
            assert_eq!(milliseconds(text), Some(expected), "{text}");
        }
        for text in ["", "5", "s", "-1s", "1x", "1..2s", ".s", "99999999999999999h", "1 s"] {
            assert_eq!(parse_duration(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_formatted_duration_is_parsed_to_the_same_duration(nanoseconds in 0..=i64::MAX.unsigned_abs()) {
            let duration = Duration::from_nanos(nanoseconds);
            prop_assert_eq!(parse_duration(&show_duration(duration)), Some(duration));
        }
    }
}
