//! `make demo`: a control plane on a folder of manifests, three nodes in network namespaces, a web
//! service, and live changes.
//!
//! Ends with the line `demo: ok` and exit code 0 when every step behaved, with 1 and the reason
//! when one did not, with 130 when interrupted. Whatever happens, namespaces, processes and files
//! go away again.

mod interrupt;
mod keep;
mod screen;
mod story;

use std::process::ExitCode;

use clap::Parser as _;
use headgate_tests::testbed::Backend;

use interrupt::Interrupt;
use screen::Screen;

/// Shows Headgate at work on this machine, in network namespaces. Needs root.
#[derive(Debug, clap::Parser)]
#[command(name = "demo")]
struct Args {
    /// Leave everything running until Ctrl-C, and print commands to try
    #[arg(long)]
    keep: bool,
    /// Variant of iptables that the nodes use
    #[arg(long, value_enum, default_value = "nft")]
    iptables: Variant,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Variant {
    Nft,
    Legacy,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let screen = Screen::for_stdout();
    let backend = match args.iptables {
        Variant::Nft => Backend::IptablesNft,
        Variant::Legacy => Backend::IptablesLegacy,
    };
    let interrupt = match Interrupt::install() {
        Ok(interrupt) => interrupt,
        Err(error) => {
            eprintln!("demo: failed: {error:#}");
            return ExitCode::FAILURE;
        }
    };
    let told = story::tell(backend, args.keep, &screen, &interrupt);
    let clean = keep::remove_leftovers();
    match (told, clean) {
        // What an interruption breaks on its way is no finding.
        (Err(_), Ok(())) if interrupt.came() => {
            eprintln!("demo: interrupted; everything is taken down");
            ExitCode::from(130)
        }
        (Err(error), clean) => {
            eprintln!("demo: failed: {error:#}");
            if let Err(error) = clean {
                eprintln!("demo: and something stays behind: {error:#}");
            }
            ExitCode::FAILURE
        }
        (Ok(()), Err(error)) => {
            eprintln!("demo: failed: something stays behind: {error:#}");
            ExitCode::FAILURE
        }
        (Ok(()), Ok(())) => {
            screen.last_line("demo: ok");
            ExitCode::SUCCESS
        }
    }
}
