//! The size goals of the `wire` bench. The sizes do not vary between runs, so a test can check the
//! goals.

#[test]
fn a_change_costs_no_more_bytes_than_the_goals_allow() {
    let figures = headgate_tests::bench::wire::run().unwrap_or_else(|error| panic!("{error:#}"));
    for figure in &figures {
        println!("{:<60} {:>8.2} of {:>9.1}", figure.name, figure.value, figure.anchor.unwrap_or_default());
        assert!(figure.value > 0.0 && figure.ratio.is_some_and(|ratio| ratio < 1.0), "{figure:?}");
    }
    assert_eq!(figures.len(), 2 * 2 * 7);
}
