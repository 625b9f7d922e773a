//! The rule for names of nodes. The control plane and `headgatectl`, which makes certificates,
//! share this rule.

/// Maximum length of the name of a Kubernetes object.
const MAX_BYTES: usize = 253;

/// Checks that a name is a DNS subdomain in lower case (RFC 1123).
///
/// # Errors
///
/// Returns a sentence with the fault of the name and the names that are allowed.
pub fn check_subdomain(name: &str) -> Result<(), String> {
    let is_label = |label: &str| {
        let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        !label.is_empty() && !label.starts_with('-') && !label.ends_with('-') && label.bytes().all(is_allowed)
    };
    if name.len() > MAX_BYTES {
        return Err(format!("the name has {} bytes; at most {MAX_BYTES} are allowed", name.len()));
    }
    if !name.split('.').all(is_label) {
        return Err(format!("{name:?} is not a valid name: lower-case letters, digits, '-' and '.' are allowed"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lower_case_subdomains_are_accepted_and_other_names_are_rejected() {
        for good in ["a", "node-1", "node-1.example.com"] {
            assert_eq!(check_subdomain(good), Ok(()));
        }
        for bad in ["", "A", "a..b", "-a", "a-", "a b", "a\n", &"a".repeat(254)] {
            assert!(check_subdomain(bad).is_err(), "{bad}");
        }
    }
}
