//! `iptables-growth`: the time of the first sync in the nft variant, the memory of the agent, and
//! the memory of the iptables programs, for several sizes of the cluster. Each size is compared
//! with the previous size. If the ratio of two values is above the ratio of the sizes, the value
//! grows faster than the cluster. The bench runs real programs: a control plane with a folder of
//! manifests, and an agent.

use anyhow::Result;

use super::{
    memory::{Alone, Measured, Mode, measure},
    report::Figure,
};

const SIZES: [u32; 4] = [1_000, 10_000, 25_000, 50_000];
const ENDPOINTS: u32 = 10;

/// Runs the bench for one size, or for all sizes.
///
/// # Errors
/// A program does not start, or a first sync does not end in time.
pub fn run(services: Option<u32>) -> Result<Vec<Figure>> {
    let sizes = services.map_or_else(|| SIZES.to_vec(), |services| vec![services]);
    let mut figures = Vec::new();
    let mut before: Option<(u32, Measured)> = None;
    for services in sizes {
        let measured = measure(Mode::Iptables("nft"), services, ENDPOINTS, Alone::No)?;
        for (i, (what, unit, value)) in columns(&measured).into_iter().enumerate() {
            let name = format!("iptables-growth/nft/{what}/{services}x{ENDPOINTS}");
            figures.push(match &before {
                Some((fewer, before)) => {
                    Figure::against(name, value, unit, format!("{fewer} Services"), columns(before)[i].2)
                }
                None => Figure::alone(name, value, unit),
            });
        }
        before = Some((services, measured));
    }
    Ok(figures)
}

/// The figures of one size: name, unit, value.
fn columns(measured: &Measured) -> [(&'static str, &'static str, f64); 3] {
    [
        ("first-sync", "s", measured.first_sync_seconds),
        ("agent-resident", "MB", measured.resident),
        ("programs-highest", "MB", measured.first_sync_programs),
    ]
}
