//! Prints all tables of this network namespace and their contents in the representation of this
//! crate.

use nftables_netlink::{Nftables, NftablesError, comment_of};

fn main() -> Result<(), NftablesError> {
    let mut nftables = Nftables::open()?;
    println!("generation {}", nftables.generation()?.id);
    for table in nftables.tables(None)? {
        let name = table.object.name;
        println!("table {name}");
        for set in nftables.sets(&name)? {
            let set = set.object;
            println!("  set {}: key {:?}, data {:?}, {:?}", set.name, set.key, set.data, set.flags);
            nftables.each_element(&name, &set.name, |element| println!("    {}: {:?}", element.key, element.data))?;
        }
        let rules = nftables.rules(&name, None)?;
        for chain in nftables.chains(&name)? {
            println!("  chain {}: {:?}", chain.object.name, chain.object.base);
            for rule in rules.iter().filter(|rule| rule.object.chain == chain.object.name) {
                println!("    rule {} {}", rule.handle, comment_of(&rule.object.user_data).unwrap_or_default());
                rule.object.expressions.iter().for_each(|expression| println!("      {expression:?}"));
            }
        }
    }
    Ok(())
}
