//! The period of validity of certificates.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use x509_parser::{prelude::X509Certificate, time::ASN1Time};

/// A certificate's `notBefore` and `notAfter` (RFC 5280, 4.1.2.5), both inclusive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    /// The first valid second.
    pub not_before: SystemTime,
    /// The last valid second.
    pub not_after: SystemTime,
}

impl Validity {
    /// The validity of a parsed certificate.
    pub fn of(certificate: &X509Certificate<'_>) -> Self {
        let validity = certificate.validity();
        let at = |time: ASN1Time| {
            let seconds = Duration::from_secs(time.timestamp().unsigned_abs());
            if time.timestamp() < 0 { UNIX_EPOCH - seconds } else { UNIX_EPOCH + seconds }
        };
        Self { not_before: at(validity.not_before), not_after: at(validity.not_after) }
    }

    /// Returns whether the last valid second is over.
    pub fn has_expired(&self, now: SystemTime) -> bool {
        now.duration_since(self.not_after).is_ok_and(|since| since >= Duration::from_secs(1))
    }

    /// `notAfter` in seconds since the Unix epoch, for metrics.
    pub fn not_after_unix_seconds(&self) -> i64 {
        unix_seconds(self.not_after)
    }
}

fn unix_seconds(time: SystemTime) -> i64 {
    match time.duration_since(UNIX_EPOCH) {
        Ok(since) => i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        Err(error) => i64::try_from(error.duration().as_secs()).map_or(i64::MIN, |before| -before),
    }
}

/// Formats a time as in RFC 3339: `2026-11-30T12:00:00Z`.
pub fn date(time: SystemTime) -> String {
    let seconds = unix_seconds(time);
    let Ok(time) = ASN1Time::from_timestamp(seconds) else { return format!("{seconds} s after 1970") };
    let time = time.to_datetime();
    let (month, day) = (u8::from(time.month()), time.day());
    format!("{:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", time.year(), time.hour(), time.minute(), time.second())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_is_valid_in_its_last_second() {
        let not_after = UNIX_EPOCH + Duration::from_secs(100);
        let validity = Validity { not_before: UNIX_EPOCH, not_after };
        assert!(!validity.has_expired(not_after) && !validity.has_expired(UNIX_EPOCH));
        assert!(validity.has_expired(not_after + Duration::from_secs(1)));
    }
}
