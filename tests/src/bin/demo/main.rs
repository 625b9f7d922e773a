//! `make demo`: a control plane with a folder of manifests, three nodes in network namespaces, a
//! web Service, and changes of this Service.
//!
//! If all steps succeed, the demo prints `demo: ok` and exits with code 0. If a step fails, the
//! demo prints the reason and exits with code 1. After an interruption it exits with code 130. In
//! all cases it removes its namespaces and files, and ends its processes.

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
    let result = story::tell(backend, args.keep, &screen, &interrupt);
    let clean = keep::remove_leftovers();
    match (result, clean) {
        // An error after an interruption is expected.
        (Err(_), Ok(())) if interrupt.came() => {
            eprintln!("demo: interrupted; everything is removed");
            ExitCode::from(130)
        }
        (Err(error), clean) => {
            eprintln!("demo: failed: {error:#}");
            if let Err(error) = clean {
                eprintln!("demo: the clean-up failed, too: {error:#}");
            }
            ExitCode::FAILURE
        }
        (Ok(()), Err(error)) => {
            eprintln!("demo: failed: the clean-up failed: {error:#}");
            ExitCode::FAILURE
        }
        (Ok(()), Ok(())) => {
            screen.last_line("demo: ok");
            ExitCode::SUCCESS
        }
    }
}
