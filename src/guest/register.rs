//! Init's list of detachable execs: which shim has which, and how it describes it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Bound;
use std::os::fd::AsFd;

use nix::unistd::Pid;

use super::leash::{Leash, MAX_ID, Message, Patience, Tag};

/// Execs that ended and are kept for whoever asks.
const MAX_ENDED: usize = 16;
/// Execs altogether.
const MAX_EXECS: usize = 1024;

/// The shims that live, each with init's end of its leash.
pub type Shims = HashMap<Pid, Option<Leash>>;

#[derive(Debug)]
struct Entry {
    shim: Pid,
    description: Vec<u8>,
}

#[derive(Debug, Default)]
pub struct Register {
    execs: BTreeMap<Vec<u8>, Entry>,
    /// Oldest first.
    ended: VecDeque<Vec<u8>>,
}

impl Register {
    /// Does what a shim asks for. Nothing here waits: a shim that takes no answer gets none.
    pub fn hear(&mut self, from: Pid, message: Message, shims: &Shims) {
        let Message {
            tag,
            id,
            body,
            connection,
        } = message;
        match tag {
            Tag::Register => {
                let free = !id.is_empty() && id.len() <= MAX_ID && self.execs.len() < MAX_EXECS;
                let free = free && !self.execs.contains_key(&id);
                if free {
                    let entry = Entry {
                        shim: from,
                        description: body,
                    };
                    self.execs.insert(id, entry);
                }
                say(shims, from, if free { Tag::Yes } else { Tag::No });
            }
            Tag::Describe | Tag::Ended => {
                let Some(entry) = self.execs.get_mut(&id).filter(|entry| entry.shim == from) else {
                    return;
                };
                entry.description = body;
                if tag == Tag::Ended {
                    self.ended.push_back(id);
                }
                if self.ended.len() > MAX_ENDED
                    && let Some(entry) = self.ended.pop_front().and_then(|id| self.execs.get(&id))
                {
                    say(shims, entry.shim, Tag::Forget);
                }
            }
            Tag::HandOver => {
                let leash = self.execs.get(&id).and_then(|entry| shims.get(&entry.shim)?.as_ref());
                let connection = connection.as_ref().map(AsFd::as_fd);
                let taken = leash.is_some_and(|leash| leash.send(tag, &id, &body, connection, Patience::Now).is_ok());
                say(shims, from, if taken { Tag::Yes } else { Tag::No });
            }
            Tag::Next => {
                let after = (Bound::Excluded(id), Bound::Unbounded);
                match self.execs.range(after).next() {
                    None => say(shims, from, Tag::No),
                    Some((id, entry)) => answer(shims, from, Tag::Found, id, &entry.description),
                }
            }
            Tag::Leave => {
                self.forget(from);
                say(shims, from, Tag::Yes);
            }
            // The last two are init's own.
            Tag::Found | Tag::Yes | Tag::No | Tag::Forget | Tag::Busy | Tag::Free => {}
        }
    }

    /// A shim is gone, or is about to go, and its exec with it.
    pub fn forget(&mut self, shim: Pid) {
        self.execs.retain(|_, entry| entry.shim != shim);
        let execs = &self.execs;
        self.ended.retain(|id| execs.contains_key(id));
    }
}

pub fn say(shims: &Shims, to: Pid, tag: Tag) {
    answer(shims, to, tag, &[], &[]);
}

fn answer(shims: &Shims, to: Pid, tag: Tag, id: &[u8], body: &[u8]) {
    if let Some(Some(leash)) = shims.get(&to) {
        // One that is gone, or that takes nothing, is reaped or learns by itself.
        let _ = leash.send(tag, id, body, None, Patience::Now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_has_one_owner_and_goes_with_it() {
        let mut shims = Shims::new();
        let mut lines = HashMap::new();
        for pid in [2, 3].map(Pid::from_raw) {
            let (inits, shims_end) = Leash::pair().unwrap();
            shims.insert(pid, Some(inits));
            lines.insert(pid, shims_end);
        }
        let mut register = Register::default();
        let ask = |register: &mut Register, from: i32, tag, id: &str, body: &str| {
            let message = Message {
                tag,
                id: id.into(),
                body: body.into(),
                connection: None,
            };
            register.hear(Pid::from_raw(from), message, &shims);
            let answer = lines[&Pid::from_raw(from)].receive(Patience::Now);
            answer.ok().flatten().map(|answer| (answer.tag, answer.body))
        };
        let word = |tag| Some((tag, Vec::new()));
        assert_eq!(ask(&mut register, 2, Tag::Register, "a", "1"), word(Tag::Yes));
        assert_eq!(ask(&mut register, 3, Tag::Register, "a", "2"), word(Tag::No), "taken");
        assert_eq!(ask(&mut register, 3, Tag::Describe, "a", "forged"), None);
        assert_eq!(
            ask(&mut register, 3, Tag::Next, "", ""),
            Some((Tag::Found, b"1".to_vec()))
        );
        assert_eq!(ask(&mut register, 3, Tag::Next, "a", ""), word(Tag::No));
        assert_eq!(ask(&mut register, 3, Tag::HandOver, "b", ""), word(Tag::No));
        assert_eq!(ask(&mut register, 3, Tag::HandOver, "a", "x"), word(Tag::Yes));
        for n in 0..=MAX_ENDED {
            let id = format!("e{n}");
            assert_eq!(ask(&mut register, 3, Tag::Register, &id, ""), word(Tag::Yes));
            let told = ask(&mut register, 3, Tag::Ended, &id, "end");
            assert_eq!(told, (n == MAX_ENDED).then(|| (Tag::Forget, Vec::new())), "{n}");
        }
        assert_eq!(
            ask(&mut register, 3, Tag::Leave, "a", ""),
            word(Tag::Yes),
            "its own alone"
        );
        let handed_over = lines[&Pid::from_raw(2)].receive(Patience::Now).unwrap().unwrap();
        assert_eq!((handed_over.tag, handed_over.body), (Tag::HandOver, b"x".to_vec()));
        assert_eq!(
            ask(&mut register, 2, Tag::Next, "", ""),
            Some((Tag::Found, b"1".to_vec()))
        );
        assert_eq!(ask(&mut register, 2, Tag::Leave, "a", ""), word(Tag::Yes));
        assert_eq!(ask(&mut register, 3, Tag::HandOver, "a", "x"), word(Tag::No));
    }
}
