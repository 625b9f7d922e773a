//! New connections in nftables mode while the endpoints of their Service are replaced.

use headgate_tests::{bench::nft_replace, testbed::netns};

// rows of nftables: 89
#[test]
fn no_connection_is_refused_or_misled_while_nftables_replaces_endpoints() {
    netns::check_prerequisites().unwrap();
    netns::sweep_stale().unwrap();
    let mut seen = nft_replace::measure(300).unwrap();
    // On a busy machine, clients may get no turn between the two ends of a replacement.
    for _ in 0..20 {
        if seen.crossed > 0 {
            break;
        }
        seen = nft_replace::measure(300).unwrap();
    }
    assert!(seen.crossed > 0, "no connection was open during a replacement: {seen:?}");
}
