//! An address of its own for each allowed name: no question has to leave the host, and whoever then connects to such an
//! address has said which name is meant.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Mutex, PoisonError};

use crate::egress::name::HostName;

/// 198.18.0.0/15 (RFC 2544): on no network.
const FIRST: u32 = 0xc612_0001;
/// When all are given away the oldest is taken back.
const MOST: u32 = 16 << 10;

#[derive(Debug, Default)]
pub(in crate::egress) struct Names(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    by_name: HashMap<HostName, u32>,
    by_number: HashMap<u32, HostName>,
    next: u32,
}

impl Names {
    pub fn address_of(&self, name: &HostName) -> Ipv4Addr {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let number = match table.by_name.get(name) {
            Some(number) => *number,
            None => {
                let number = table.next % MOST;
                table.next = (number + 1) % MOST;
                if let Some(old) = table.by_number.insert(number, name.clone()) {
                    table.by_name.remove(&old);
                }
                table.by_name.insert(name.clone(), number);
                number
            }
        };
        Ipv4Addr::from(FIRST + number)
    }

    pub fn name_of(&self, address: IpAddr) -> Option<HostName> {
        let IpAddr::V4(address) = address.to_canonical() else {
            return None;
        };
        let number = u32::from(address).checked_sub(FIRST)?;
        let table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        table.by_number.get(&number).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_keeps_its_address_and_an_address_its_name() {
        let names = Names::default();
        let name = |n: u32| HostName::parse(format!("n{n}.example").as_bytes()).unwrap();
        let first = names.address_of(&name(0));
        assert_eq!(
            (first, names.address_of(&name(0))),
            (Ipv4Addr::new(198, 18, 0, 1), first)
        );
        assert_eq!(names.name_of(first.into()), Some(name(0)));
        assert_eq!(names.name_of(IpAddr::from([198, 18, 0, 2])), None);
        assert_eq!(names.name_of(IpAddr::from([198, 17, 0, 2])), None);
        for n in 1..=MOST {
            names.address_of(&name(n));
        }
        assert_eq!(names.name_of(first.into()), Some(name(MOST)), "the oldest made room");
        assert_eq!(names.name_of(names.address_of(&name(0)).into()), Some(name(0)));
    }
}
