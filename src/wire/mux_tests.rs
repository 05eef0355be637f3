use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// Carries everything from one end to the other.
fn carry(from: &mut Mux, to: &mut Mux) -> Vec<News> {
    let mut news = Vec::new();
    while !from.outbox().is_empty() {
        let piece = from.outbox().to_vec();
        from.went(piece.len());
        news.extend(to.receive(&piece).unwrap());
    }
    news
}

fn frame(kind: Kind, id: u32, number: u32, data: &[u8]) -> Vec<u8> {
    [&[kind as u8][..], &id.to_be_bytes(), &number.to_be_bytes(), data].concat()
}

/// A host with one open connection, and nothing to say.
fn host() -> Mux {
    let mut host = Mux::new(Side::Host);
    assert_eq!(host.open(), 1);
    host.went(host.outbox().len());
    host
}

#[test]
fn a_connection_from_open_to_its_last_word() {
    let (mut host, mut guest) = (Mux::new(Side::Host), Mux::new(Side::Guest));
    let id = host.open();
    host.send(id, b"question");
    host.end(id);
    assert_eq!(carry(&mut host, &mut guest), [News::Opened(id)]);
    assert_eq!(
        (guest.waiting(id), guest.incoming(id)),
        (&b"question"[..], Incoming::Ended)
    );
    guest.took(id, 8);
    guest.send(id, b"answer");
    guest.close(id);
    assert_eq!(carry(&mut guest, &mut host), []);
    assert_eq!(
        (host.waiting(id), host.incoming(id)),
        (&b"answer"[..], Incoming::Closed)
    );
    assert_eq!((host.room(id), guest.room(id)), (0, 0));
}

#[test]
fn a_window_is_kept_and_given_back() {
    let (mut host, mut guest) = (Mux::new(Side::Host), Mux::new(Side::Guest));
    let id = host.open();
    let mut sent = 0;
    for _ in 0..100 {
        let room = host.room(id);
        host.send(id, &vec![1; room]);
        sent += room;
        carry(&mut host, &mut guest);
    }
    assert_eq!(
        (sent, host.room(id), guest.connections[&id].waiting.len()),
        (WINDOW, 0, WINDOW)
    );
    // Another connection is not held up.
    let other = host.open();
    assert_eq!(host.room(other), CHUNK);
    guest.took(id, CHUNK);
    guest.credit();
    carry(&mut guest, &mut host);
    assert_eq!(host.room(id), CHUNK);
}

#[test]
fn what_waits_to_go_out_is_bounded() {
    let mut host = Mux::new(Side::Host);
    let mut opened = Vec::new();
    while host.can_open() {
        opened.push(host.open());
    }
    assert_eq!(opened.len(), CONNECTIONS);
    for id in &opened {
        while host.room(*id) > 0 {
            let room = host.room(*id);
            host.send(*id, &vec![0; room]);
        }
    }
    assert!(host.outbox.len() <= OUTBOX + (CONNECTIONS + OUTBOX / CHUNK + 1) * HEADER);
}

#[test]
fn quiet_is_at_the_end_of_a_frame_and_a_new_host_starts_afresh() {
    let (mut host, mut guest) = (Mux::new(Side::Host), Mux::new(Side::Guest));
    let id = host.open();
    host.pause();
    assert_eq!(carry(&mut host, &mut guest), [News::Opened(id), News::Pause]);
    guest.send(id, b"before");
    guest.hold();
    assert_eq!(guest.room(id), 0);
    guest.paused();
    assert_eq!(carry(&mut guest, &mut host), [News::Paused]);
    assert_eq!((host.waiting(id), host.can_open()), (&b"before"[..], false));

    let mut new_host = Mux::new(Side::Host);
    new_host.resume(true);
    assert!(!new_host.can_open(), "the guest still has a connection of that number");
    assert_eq!(carry(&mut new_host, &mut guest), [News::Resume { is_new_host: true }]);
    assert_eq!(guest.resumed(true), [id]);
    assert_eq!(carry(&mut guest, &mut new_host), []);
    assert!(new_host.can_open());
    assert_eq!(new_host.open(), id);
    assert_eq!(carry(&mut new_host, &mut guest), [News::Opened(id)]);
}

/// The host believes nothing.
#[test]
fn each_broken_rule_is_named() {
    let mut all = vec![
        (vec![99; HEADER], "an unknown kind of frame"),
        (frame(Kind::Data, 1, CHUNK as u32 + 1, b""), "a frame that is too long"),
        (frame(Kind::Data, 1, u32::MAX, b""), "a frame that is too long"),
        (frame(Kind::Data, 1, 0, b""), "empty data"),
        (frame(Kind::Data, 2, 1, b"x"), "a connection that never was"),
        (frame(Kind::Close, 0, 0, b""), "a connection that never was"),
        (frame(Kind::Credit, 1, 1, b""), "credit for what was not sent"),
        (frame(Kind::Credit, 1, u32::MAX, b""), "credit for what was not sent"),
        (
            [frame(Kind::Eof, 1, 0, b""), frame(Kind::Data, 1, 1, b"x")].concat(),
            "data after its end",
        ),
        (
            [frame(Kind::Close, 1, 0, b""), frame(Kind::Eof, 1, 0, b"")].concat(),
            "a word after the last",
        ),
        (
            frame(Kind::Data, 1, CHUNK as u32, &[0; CHUNK]).repeat(WINDOW / CHUNK + 1),
            "data beyond the window",
        ),
    ];
    for kind in [Kind::Open, Kind::Pause, Kind::Resume, Kind::End] {
        all.push((frame(kind, 2, 0, b""), "a frame that only the host may send"));
    }
    for (bytes, rule) in all {
        assert_eq!(host().receive(&bytes), Err(Violation(rule)), "{:?}", &bytes[..HEADER]);
    }
    let mut guest = Mux::new(Side::Guest);
    let twice = frame(Kind::Open, 5, 0, b"").repeat(2);
    assert_eq!(
        guest.receive(&twice),
        Err(Violation("a connection's number used twice"))
    );
}

#[test]
fn words_for_a_connection_that_was_closed_here_count_for_nothing() {
    let mut host = host();
    host.close(1);
    let late = [frame(Kind::Data, 1, 1, b"x"), frame(Kind::Credit, 1, 9, b"")].concat();
    assert_eq!(host.receive(&late), Ok(vec![]));
}

/// Bytes that look like frames, most of the time.
fn noise() -> impl Strategy<Value = Vec<u8>> {
    let piece = (0_u8..12, 0_u32..4, 0_u32..70_000, 0_usize..40_000);
    let pieces = prop::collection::vec(piece, 0..60);
    pieces.prop_map(|pieces| {
        let mut bytes = Vec::new();
        for (kind, id, number, data) in pieces {
            bytes.push(kind);
            bytes.extend(id.to_be_bytes());
            bytes.extend(number.to_be_bytes());
            bytes.extend(vec![kind; data.min(number as usize)]);
        }
        bytes
    })
}

#[derive(Debug, Clone)]
enum Act {
    Open,
    Send { from_host: bool, at: usize, bytes: usize },
    End { from_host: bool, at: usize },
    Take { on_host: bool, at: usize, bytes: usize },
    Carry { from_host: bool, bytes: usize },
}

fn act() -> impl Strategy<Value = Act> {
    let (side, at) = (any::<bool>(), 0_usize..8);
    prop_oneof![
        Just(Act::Open),
        (side, at.clone(), 0_usize..50_000).prop_map(|(from_host, at, bytes)| Act::Send { from_host, at, bytes }),
        (side, at.clone()).prop_map(|(from_host, at)| Act::End { from_host, at }),
        (side, at, 0_usize..90_000).prop_map(|(on_host, at, bytes)| Act::Take { on_host, at, bytes }),
        (side, 0_usize..90_000).prop_map(|(from_host, bytes)| Act::Carry { from_host, bytes }),
    ]
    .boxed()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever a guest sends: no panic, and never more held than said.
    #[test]
    fn noise_cannot_make_the_host_hold_much(bytes in noise(), cut in 1_usize..9000) {
        let mut host = Mux::new(Side::Host);
        let ids = [host.open(), host.open()];
        for piece in bytes.chunks(cut) {
            if host.receive(piece).is_err() {
                break;
            }
            let held: usize = ids.iter().filter_map(|id| host.connections.get(id)).map(|c| c.waiting.len()).sum();
            prop_assert!(held <= ids.len() * WINDOW && host.inbox.len() < CHUNK + HEADER);
        }
    }

    /// What one end is given the other end gives out, in order, however it is cut.
    #[test]
    fn bytes_arrive_whole_and_in_order(acts in prop::collection::vec(act(), 1..150)) {
        let mut ends = [Mux::new(Side::Guest), Mux::new(Side::Host)];
        let mut ids = Vec::new();
        // By connection and whether it is from the host: bytes given, bytes taken out. The n-th byte is n.
        let mut flows: BTreeMap<(u32, bool), (usize, usize)> = BTreeMap::new();
        let carry = |ends: &mut [Mux; 2], from_host: bool, most: usize| {
            let most = most.min(ends[usize::from(from_host)].outbox().len());
            let piece = ends[usize::from(from_host)].outbox()[..most].to_vec();
            ends[usize::from(from_host)].went(most);
            ends[usize::from(!from_host)].receive(&piece).unwrap();
        };
        let take = |ends: &mut [Mux; 2], flows: &mut BTreeMap<(u32, bool), (usize, usize)>, on_host: bool, id: u32, most: usize| {
            let end = &mut ends[usize::from(on_host)];
            let piece = end.waiting(id);
            let piece = piece[..most.min(piece.len())].to_vec();
            let flow = flows.entry((id, !on_host)).or_default();
            for byte in &piece {
                assert_eq!(*byte, flow.1 as u8);
                flow.1 += 1;
            }
            end.took(id, piece.len());
            end.credit();
        };
        for act in acts {
            let known = |at: usize| ids.get(at % ids.len().max(1)).copied().unwrap_or(0);
            match act {
                Act::Open if ends[1].can_open() => ids.push(ends[1].open()),
                Act::Open => {}
                Act::Send { from_host, at, bytes } => {
                    let (id, end) = (known(at), &mut ends[usize::from(from_host)]);
                    let flow = flows.entry((id, from_host)).or_default();
                    let bytes = bytes.min(end.room(id));
                    end.send(id, &(flow.0..flow.0 + bytes).map(|n| n as u8).collect::<Vec<_>>());
                    flow.0 += bytes;
                }
                Act::End { from_host, at } => ends[usize::from(from_host)].end(known(at)),
                Act::Take { on_host, at, bytes } => take(&mut ends, &mut flows, on_host, known(at), bytes),
                Act::Carry { from_host, bytes } => carry(&mut ends, from_host, bytes),
            }
        }
        // In the end all of it comes out: nothing waits for another connection.
        while ends.iter().any(|end| !end.outbox().is_empty() || ids.iter().any(|id| !end.waiting(*id).is_empty())) {
            for from_host in [true, false] {
                carry(&mut ends, from_host, usize::MAX);
            }
            for id in &ids {
                for on_host in [true, false] {
                    take(&mut ends, &mut flows, on_host, *id, usize::MAX);
                }
            }
        }
        for (key, (given, taken)) in flows {
            prop_assert_eq!(given, taken, "{:?}", key);
        }
    }
}
