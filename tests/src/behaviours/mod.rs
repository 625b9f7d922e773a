//! Which test proves which behaviour: the page `docs/behaviours.md`.
//!
//! [`rows`] is the checklist. A test names the rows that it proves in a comment `// rows: 31, 36`
//! directly above its attributes, in any crate; `// rows of ipvs: 102` where it proves them for one
//! backend only. A case of the packet table names them as data, and counts for the test that runs
//! its group. [`scan`] finds both, [`report`] reads what became of the tests, and [`page`] writes
//! the page. A row needs a test or a stated reason.

pub mod page;
pub mod report;
pub mod rows;
pub mod scan;

pub use page::render;
pub use report::Report;
pub use rows::Column;
pub use scan::{Evidence, ProvingTest, ScanError};
