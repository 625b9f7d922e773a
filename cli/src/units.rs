//! Times and durations as people write them.

/// A duration in its two largest units: `740ms`, `4.2s`, `3m12s`, `5h03m`, `12d4h`.
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

/// A duration given in microseconds: `850µs`, `12.3ms`, then as [`duration`].
pub fn microseconds(value: u64) -> String {
    match value {
        0 => "-".to_owned(),
        1..1000 => format!("{value}µs"),
        1000..100_000 => format!("{}.{}ms", value / 1000, value % 1000 / 100),
        _ => duration(value / 1000),
    }
}

/// Time of day, UTC, of a moment in milliseconds since the Unix epoch: `09:13:41.250`.
pub fn time_of_day(unix_ms: u64) -> String {
    let of_day = unix_ms % 86_400_000;
    let (hours, minutes, seconds) = (of_day / 3_600_000, of_day / 60_000 % 60, of_day / 1000 % 60);
    format!("{hours:02}:{minutes:02}:{seconds:02}.{:03}", of_day % 1000)
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
    fn a_moment_shows_its_time_of_day() {
        assert_eq!(time_of_day(0), "00:00:00.000");
        assert_eq!(time_of_day(86_400_000 + 33_221_250), "09:13:41.250");
    }
}
