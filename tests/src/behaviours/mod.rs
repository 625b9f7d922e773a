//! Generates `docs/behaviours.md`, which lists the tests of each behaviour.
//!
//! [`rows`] is the checklist. A test of any crate lists its rows in a comment `// rows: 31, 36`
//! directly above its attributes, or above its line in a table of tests. For one backend alone, the
//! comment is `// rows of ipvs: 102`. A case of the packet table has a field with its rows, and so
//! has a scenario that shares a cluster. These rows count for the test that runs the case or the
//! scenario. [`scan`] finds the comments and the cases, [`report`] reads the results of the tests,
//! and [`page`] renders the page. Every row needs a test, or a reason why no test exists.

pub mod page;
pub mod report;
pub mod rows;
pub mod scan;

pub use page::render;
pub use report::Report;
pub use rows::Column;
pub use scan::{Evidence, ProvingTest, ScanError};
