//! Process 1 of the test machines (see `headgate_tests::uml`).

fn main() -> anyhow::Result<()> {
    headgate_tests::uml::guest::main()
}
