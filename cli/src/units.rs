//! Formatting and parsing of times and durations.

use std::time::Duration;

use headgate_settings::value;

/// A duration in milliseconds.
pub fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Formats a duration in its two largest units: `740ms`, `4.2s`, `3m12s`, `5h03m`, `12d4h`.
pub fn duration(milliseconds: u64) -> String {
    let seconds = milliseconds / 1000;
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match milliseconds {
        0 => "0".to_owned(),
        1..1000 => format!("{milliseconds}ms"),
        1000..10_000 => format!("{seconds}.{}s", milliseconds % 1000 / 100),
        10_000..60_000 => format!("{seconds}s"),
        60_000..3_600_000 => format!("{minutes}m{:02}s", seconds % 60),
        3_600_000..86_400_000 => format!("{hours}h{:02}m", minutes % 60),
        _ => format!("{days}d{}h", hours % 24),
    }
}

/// Formats a time in the past: `just now`, `4.2s ago`.
pub fn ago(milliseconds: u64) -> String {
    match milliseconds {
        0 => "just now".to_owned(),
        past => format!("{} ago", duration(past)),
    }
}

/// Formats a duration given in microseconds: `850µs`, `12.3ms`. Longer durations are formatted like
/// [`duration`].
pub fn microseconds(value: u64) -> String {
    match value {
        0 => "-".to_owned(),
        1..1000 => format!("{value}µs"),
        1000..100_000 => format!("{}.{}ms", value / 1000, value % 1000 / 100),
        _ => duration(value / 1000),
    }
}

/// Formats a number of bytes: `812 B`, `4.2 KiB`, `31 MiB`.
pub fn bytes(value: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if value < 1024 {
        return format!("{value} B");
    }
    let unit = (value.ilog2() / 10 - 1) as usize;
    // Tenths of the unit, rounded down.
    let tenths = (value >> (unit * 10)) * 10 / 1024;
    match tenths {
        0..100 => format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit]),
        _ => format!("{} {}", tenths / 10, UNITS[unit]),
    }
}

/// Formats the UTC time of day of a time in milliseconds since the Unix epoch: `09:13:41.250`.
pub fn time_of_day(unix_ms: u64) -> String {
    let of_day = unix_ms % 86_400_000;
    let (hours, minutes, seconds) = (of_day / 3_600_000, of_day / 60_000 % 60, of_day / 1000 % 60);
    format!("{hours:02}:{minutes:02}:{seconds:02}.{:03}", of_day % 1000)
}

/// The longest duration of an option.
const DAY: Duration = Duration::from_secs(86_400);

/// Parses a duration such as `90s`, `1h30m` or `250ms`. The duration must be at least a millisecond
/// and at most a day.
pub fn parse_duration(text: &str) -> Result<Duration, &'static str> {
    let duration = value::parse_duration(text).ok_or("write numbers with units: 250ms, 90s, 5m or 1h30m")?;
    let is_allowed = (Duration::from_millis(1)..=DAY).contains(&duration);
    if is_allowed { Ok(duration) } else { Err("must be at least 1ms and at most a day") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_show_two_units() {
        let shown = |milliseconds| duration(milliseconds);
        assert_eq!(shown(0), "0");
        assert_eq!(shown(999), "999ms");
        assert_eq!(shown(4_250), "4.2s");
        assert_eq!(shown(59_999), "59s");
        assert_eq!(shown(192_000), "3m12s");
        assert_eq!(shown(18_180_000), "5h03m");
        assert_eq!(shown(12 * 86_400_000 + 4 * 3_600_000), "12d4h");
        assert_eq!(microseconds(850), "850µs");
        assert_eq!(microseconds(12_345), "12.3ms");
        assert_eq!(microseconds(1_500_000), "1.5s");
    }

    #[test]
    fn bytes_show_two_digits_or_whole_units() {
        assert_eq!([0, 1023, 1024].map(bytes), ["0 B", "1023 B", "1.0 KiB"]);
        assert_eq!([10_239, 10_240, 1_048_575].map(bytes), ["9.9 KiB", "10 KiB", "1023 KiB"]);
        assert_eq!([1 << 20, 5 << 40, u64::MAX].map(bytes), ["1.0 MiB", "5.0 TiB", "15 EiB"]);
    }

    #[test]
    fn durations_are_parsed_with_their_unit() {
        let seconds = |text| parse_duration(text).map(|duration| duration.as_secs_f64());
        assert_eq!((seconds("90s"), seconds("5m"), seconds("250ms")), (Ok(90.0), Ok(300.0), Ok(0.25)));
        assert_eq!((seconds("1h30m"), seconds("1.5s")), (Ok(5400.0), Ok(1.5)));
        for wrong in ["", "60", "s", "0s", "1us", "25h", "-1s", "99999999999999999999h"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_time_is_formatted_as_time_of_day() {
        assert_eq!(time_of_day(0), "00:00:00.000");
        assert_eq!(time_of_day(86_400_000 + 33_221_250), "09:13:41.250");
    }
}
