//! Process 1 of a test machine in User-Mode Linux (see `headgate_tests::uml`).

fn main() -> anyhow::Result<()> {
    headgate_tests::uml::guest::main()
}
