//! `nft-memory`: the memory of an agent in nftables mode, at rest and at its peak, compared with an
//! agent without Services. It also measures an agent that restarts and finds its table. The bench
//! fails if the agent starts another program.

use anyhow::{Result, ensure};

use super::{
    memory::{Alone, Mode, measure},
    report::Figure,
};

const SERVICES: u32 = 10_000;
const ENDPOINTS: [u32; 2] = [10, 25];

/// Runs the bench.
///
/// # Errors
/// A program does not start, the first sync does not end in time, or the agent starts a program.
pub fn run(services: Option<u32>) -> Result<Vec<Figure>> {
    let services = services.unwrap_or(SERVICES);
    let empty = measure(Mode::Nftables, 0, 0, Alone::No)?;
    let mut figures = Vec::new();
    for endpoints in ENDPOINTS {
        let full = measure(Mode::Nftables, services, endpoints, Alone::No)?;
        ensure!(full.programs == 0.0, "the agent started programs, which had {} MB of memory", full.programs);
        let name = |what: &str| format!("nft-memory/{what}/{services}x{endpoints}");
        let anchor = "an empty agent";
        figures.push(Figure::against(name("resident"), full.resident, "MB", anchor, empty.resident));
        figures.push(Figure::against(name("peak"), full.highest, "MB", anchor, empty.highest));
        figures.push(Figure::alone(name("resident-above-empty"), full.resident - empty.resident, "MB"));
        figures.push(Figure::alone(name("peak-above-empty"), full.highest - empty.highest, "MB"));
        for (what, restarted, first) in
            [("resident", full.restarted[0], empty.resident), ("peak", full.restarted[1], empty.highest)]
        {
            figures.push(Figure::alone(name(&format!("{what}-above-empty-after-restart")), restarted - first, "MB"));
        }
    }
    Ok(figures)
}
