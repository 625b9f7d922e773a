//! Prints the sets of this network namespace and their entries like `ipset save`.

use ipset_netlink::{Family, Header, IpSetError, IpSets, SetType};

fn main() -> Result<(), IpSetError> {
    for set in IpSets::open()?.list()? {
        println!("{}", describe(&set.header));
        for entry in set.entries {
            let comment = entry.comment.map(|comment| format!(" comment \"{comment}\"")).unwrap_or_default();
            let nomatch = if entry.nomatch { " nomatch" } else { "" };
            println!("add {} {}{nomatch}{comment}", set.header.name, entry.element);
        }
    }
    Ok(())
}

fn describe(header: &Header) -> String {
    let mut text = format!("create {} {}", header.name, header.type_name);
    if let Some((first, last)) = header.port_range {
        text += &format!(" range {first}-{last}");
    }
    if header.type_name != SetType::BitmapPort.name() {
        match header.family {
            Some(Family::V4) => text += " family inet",
            Some(Family::V6) => text += " family inet6",
            None => {}
        }
    }
    for (name, size) in [("hashsize", header.hash_size), ("maxelem", header.max_elements)] {
        if let Some(size) = size {
            text += &format!(" {name} {size}");
        }
    }
    if header.comments { text + " comment" } else { text }
}
