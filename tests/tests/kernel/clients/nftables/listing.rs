//! Compares Headgate's client of nftables with the `nft` program. The client must list what `nft`
//! creates, and `nft` must print what the client creates.

use std::{io::Write as _, process::Stdio};

use anyhow::Result;
use nftables_netlink::{Chain, Element, Nftables, Rule, Set};

use super::{in_namespace, specimen, table_name};
use headgate_tests::testbed::process::output;

fn nft(text: &str) {
    let mut program = std::process::Command::new("nft").args(["-f", "-"]).stdin(Stdio::piped()).spawn().unwrap();
    program.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(program.wait().unwrap().success());
}

/// The contents of the table as Headgate's client lists them, without handles and other values that
/// differ between runs.
#[derive(Debug, PartialEq)]
struct Listed {
    chains: Vec<Chain>,
    sets: Vec<(Set, Vec<Element>)>,
    rules: Vec<Rule>,
}

fn listed() -> Result<Listed> {
    let (mut kernel, table) = (Nftables::open()?, table_name());
    let mut sets = Vec::new();
    for mut set in kernel.sets(&table)?.into_iter().map(|set| set.object) {
        let mut elements = kernel.elements(&table, &set.name)?;
        for element in &mut elements {
            element.expires_in_ms = None;
        }
        elements.sort_by(|a, b| a.key.cmp(&b.key));
        set.user_data.clear();
        sets.push((set, elements));
    }
    sets.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));
    Ok(Listed {
        chains: kernel.chains(&table)?.into_iter().map(|chain| chain.object).collect(),
        sets,
        rules: kernel.rules(&table, None)?.into_iter().map(|rule| rule.object).collect(),
    })
}

/// The contents of the table according to [`specimen`].
fn wanted() -> Listed {
    let table = table_name();
    let specimen = specimen::specimen(&table);
    let mut sets = specimen.sets;
    for (set, elements) in &mut sets {
        set.user_data.clear();
        elements.sort_by(|a, b| a.key.cmp(&b.key));
    }
    sets.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));
    Listed { chains: specimen.chains, sets, rules: specimen.rules }
}

fn compare(found: &Listed, wanted: &Listed) {
    assert_eq!(found.chains, wanted.chains);
    for (found, wanted) in found.sets.iter().zip(&wanted.sets) {
        assert_eq!(found, wanted);
    }
    for (found, wanted) in found.rules.iter().zip(&wanted.rules) {
        assert_eq!(found, wanted);
    }
    assert_eq!(found, wanted);
}

#[test]
fn the_client_lists_what_the_program_creates() {
    in_namespace("list", || {
        nft(specimen::TEXT);
        compare(&listed()?, &wanted());
        Ok(())
    });
}

/// The output of `nft` without the remaining lifetimes of elements.
fn printed(arguments: &[&str]) -> String {
    let text = output("nft", arguments);
    let mut words = text.split_inclusive(' ');
    let mut kept = String::new();
    while let Some(word) = words.next() {
        kept.push_str(word);
        if word == "expires " {
            words.next();
        }
    }
    kept
}

/// The expressions and elements as `nft --debug=netlink` decodes them, without rule numbers. The
/// elements are sorted, because their order in the kernel depends on a random seed.
fn decoded() -> Vec<String> {
    let text = printed(&["--debug=netlink", "list", "ruleset"]);
    let without_numbers = |line: &str| match line.strip_prefix("inet shop ") {
        Some(rule) => rule.split(' ').next().unwrap_or_default().to_owned(),
        None => line.to_owned(),
    };
    let (mut elements, others): (Vec<_>, Vec<_>) =
        text.lines().map(without_numbers).partition(|line| line.starts_with("\telement"));
    elements.sort_unstable();
    [elements, others].concat()
}

#[test]
fn the_program_prints_what_the_client_creates() {
    let (text, lines) = in_namespace("print", || {
        nft(specimen::TEXT);
        Ok((printed(&["list", "ruleset"]), decoded()))
    });
    in_namespace("make", || {
        Nftables::open()?.commit(&specimen::transaction(&table_name()))?;
        assert_eq!(printed(&["list", "ruleset"]), text);
        assert_eq!(decoded(), lines);
        compare(&listed()?, &wanted());
        Ok(())
    });
}
