//! Connections that other ranks have made and that this rank has not asked for yet.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex};

use crate::link::security::Channel;
use crate::link::wire::hello::LinkId;

/// Number of unclaimed connections from which those whose other end has closed are dropped.
const WAITING: usize = 1024;

#[derive(Default, Debug)]
pub(super) struct Arrivals {
    pub(super) links: Mutex<Waiting>,
    pub(super) arrived: Condvar,
}

#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) links: HashMap<LinkId, Channel>,
    /// Number of connections from which those whose other end has closed are dropped.
    full: usize,
}

impl Default for Waiting {
    fn default() -> Self {
        Self { links: HashMap::new(), full: WAITING }
    }
}

impl Waiting {
    /// Keeps a connection. It stays when its other end has closed, since the last frames may still be read. But other ranks may
    /// make groups that this rank never makes, again and again, and their sockets must not accumulate.
    pub(super) fn keep(&mut self, id: LinkId, connection: Channel) {
        if self.links.len() >= self.full {
            self.links.retain(|_, connection| !connection.is_over());
            self.full = WAITING.max(2 * self.links.len());
        }
        self.links.insert(id, connection);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{Ipv4Addr, TcpListener, TcpStream};

    use super::*;
    use crate::types::rank::{Epoch, Rank};

    #[test]
    fn connections_of_groups_never_made_do_not_pile_up() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut waiting = Waiting { full: 3, ..Waiting::default() };
        let mut there = Vec::new();
        for group in 0..5 {
            let mut other_end = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let channel = Channel::clear(listener.accept().unwrap().0.try_into().unwrap());
            let id = LinkId::new(Epoch(1), &format!("group {group}"), Rank(1), Rank(0));
            waiting.keep(id, channel);
            other_end.write_all(b"words that nobody reads").unwrap();
            if group == 1 {
                there.push(other_end);
            }
        }
        assert_eq!(
            waiting.links.len(),
            3,
            "the one whose other end is there, and two that came after the look"
        );
    }
}
