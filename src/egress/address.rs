//! Addresses that a name must not lead to: this host, its neighbours, the cloud's metadata, and every way to write those in IPv6.
//!
//! A rule opens such a block only by naming an address range that lies *inside* it: `0.0.0.0/0` opens the Internet and none
//! of these.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::LazyLock;

use ipnet::IpNet;

/// A range of addresses that is closed unless a rule names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    pub name: &'static str,
    pub net: IpNet,
}

/// Of the IANA special-purpose registries (RFC 6890 and successors), and the metadata services of the clouds.
static BLOCKS: LazyLock<Vec<Block>> = LazyLock::new(|| {
    let blocks = [
        ("this-network", "0.0.0.0/8"),
        ("private", "10.0.0.0/8"),
        ("private", "172.16.0.0/12"),
        ("private", "192.168.0.0/16"),
        ("carrier-nat", "100.64.0.0/10"),
        ("loopback", "127.0.0.0/8"),
        ("link-local", "169.254.0.0/16"),
        ("metadata", "169.254.169.254/32"),
        ("metadata", "169.254.170.2/32"),
        ("metadata", "100.100.100.200/32"),
        ("metadata", "168.63.129.16/32"),
        ("protocol", "192.0.0.0/24"),
        ("metadata", "192.0.0.192/32"),
        ("documentation", "192.0.2.0/24"),
        ("documentation", "198.51.100.0/24"),
        ("documentation", "203.0.113.0/24"),
        ("relay", "192.88.99.0/24"),
        ("benchmark", "198.18.0.0/15"),
        ("multicast", "224.0.0.0/4"),
        ("reserved", "240.0.0.0/4"),
        ("this-network", "::/128"),
        ("loopback", "::1/128"),
        ("v4-compatible", "::/96"),
        ("v4-mapped", "::ffff:0:0/96"),
        ("v4-translated", "::ffff:0:0:0/96"),
        ("nat64", "64:ff9b::/96"),
        ("nat64", "64:ff9b:1::/48"),
        ("discard", "100::/64"),
        ("protocol", "2001::/23"),
        ("documentation", "2001:db8::/32"),
        ("documentation", "3fff::/20"),
        ("6to4", "2002::/16"),
        ("segment-routing", "5f00::/16"),
        ("private", "fc00::/7"),
        ("metadata", "fd00:ec2::254/128"),
        ("metadata", "fd20:ce::254/128"),
        ("link-local", "fe80::/10"),
        ("site-local", "fec0::/10"),
        ("multicast", "ff00::/8"),
    ];
    blocks
        .map(|(name, net)| Block {
            name,
            net: net.parse().expect("written above"),
        })
        .to_vec()
});

/// The closed blocks that `address` is in, and those of the IPv4 address that it carries. `named` tells whether a rule opens
/// a block for an address.
///
/// # Errors
/// The first block that stays closed.
pub fn check(address: IpAddr, named: impl Fn(IpAddr, &Block) -> bool) -> Result<(), Block> {
    for subject in std::iter::once(address).chain(carried(address).into_iter().flatten()) {
        for block in BLOCKS.iter().filter(|block| block.net.contains(&subject)) {
            if !named(subject, block) {
                return Err(*block);
            }
        }
    }
    Ok(())
}

/// IPv4 addresses inside an IPv6 one: where a packet to it could end.
fn carried(address: IpAddr) -> [Option<IpAddr>; 2] {
    let IpAddr::V6(address) = address else {
        return [None, None];
    };
    let v4 = |high: u16, low: u16| Some(IpAddr::V4(Ipv4Addr::from((u32::from(high) << 16) | u32::from(low))));
    let parts = address.segments();
    match parts {
        [0, 0, 0, 0, 0, 0, ..] if is_plain(address) => [None, None],
        [0, 0, 0, 0, 0, 0 | 0xffff, high, low]
        | [0, 0, 0, 0, 0xffff, 0, high, low]
        | [0x64, 0xff9b, 0, 0, 0, 0, high, low]
        | [0x2002, high, low, ..] => [v4(high, low), None],
        // Teredo (RFC 4380): the server, and the client with its bits turned.
        [0x2001, 0, high, low, _, _, client_high, client_low] => [v4(high, low), v4(!client_high, !client_low)],
        _ => [None, None],
    }
}

/// `::` and `::1` carry nothing.
fn is_plain(address: Ipv6Addr) -> bool {
    address.is_unspecified() || address.is_loopback()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn closed(text: &str) -> Option<&'static str> {
        check(text.parse().unwrap(), |_, _| false).err().map(|block| block.name)
    }

    #[test]
    fn what_is_not_the_internet_is_closed() {
        for (address, block) in [
            ("0.0.0.0", "this-network"),
            ("0.1.2.3", "this-network"),
            ("10.1.2.3", "private"),
            ("100.64.0.1", "carrier-nat"),
            ("127.0.0.1", "loopback"),
            ("127.9.9.9", "loopback"),
            ("169.254.169.254", "link-local"),
            ("168.63.129.16", "metadata"),
            ("172.31.255.255", "private"),
            ("192.168.0.1", "private"),
            ("198.19.255.1", "benchmark"),
            ("224.0.0.251", "multicast"),
            ("255.255.255.255", "reserved"),
            ("::", "this-network"),
            ("::1", "loopback"),
            ("::127.0.0.1", "v4-compatible"),
            ("::ffff:169.254.169.254", "v4-mapped"),
            ("::ffff:93.184.216.34", "v4-mapped"),
            ("64:ff9b::a9fe:a9fe", "nat64"),
            ("64:ff9b:1::1", "nat64"),
            ("2002:7f00:1::", "6to4"),
            ("2001:0:1::1", "protocol"),
            ("fd00:ec2::254", "private"),
            ("fe80::1", "link-local"),
            ("ff02::1", "multicast"),
        ] {
            assert_eq!(closed(address), Some(block), "{address}");
        }
        for address in [
            "93.184.216.34",
            "1.1.1.1",
            "172.32.0.1",
            "100.128.0.1",
            "2606:4700::1111",
            "2a00::1",
        ] {
            assert_eq!(closed(address), None, "{address}");
        }
    }

    /// Who opens NAT64 does not open the metadata service behind it.
    #[test]
    fn a_carried_address_has_to_pass_too() {
        let nat64_alone = |address: &str| check(address.parse().unwrap(), |_, block| block.name == "nat64");
        assert_eq!(nat64_alone("64:ff9b::5db8:d822"), Ok(()));
        assert_eq!(
            nat64_alone("64:ff9b::a9fe:a9fe").map_err(|block| block.name),
            Err("link-local")
        );
        let teredo = check("2001:0:5db8:d822::f5ff:fffe".parse().unwrap(), |_, block| {
            block.name == "protocol"
        });
        assert_eq!(
            teredo.map_err(|block| block.name),
            Err("private"),
            "the client is 10.0.0.1"
        );
    }
}
