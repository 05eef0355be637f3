use std::thread;
use std::time::Duration;

use nix::fcntl::OFlag;
use nix::unistd::pipe2;

use super::*;

/// Two ends over two pipes. The guest's end serves each connection by `serve`, in a thread of its own, until the host's is dropped.
fn ends(serve: fn(UnixStream)) -> Pump {
    let (host_reads, guest_writes) = pipe2(OFlag::O_CLOEXEC).unwrap();
    let (guest_reads, host_writes) = pipe2(OFlag::O_CLOEXEC).unwrap();
    let mut guest = Pump::new(Side::Guest, guest_reads, guest_writes).unwrap();
    thread::spawn(move || {
        while !(guest.is_lost() && guest.is_idle()) {
            for news in guest.turn(&[], PollTimeout::NONE).unwrap().news {
                if let News::Opened(id) = news {
                    let (ours, theirs) = UnixStream::pair().unwrap();
                    guest.attach(id, ours).unwrap();
                    thread::spawn(move || serve(theirs));
                }
            }
        }
    });
    Pump::new(Side::Host, host_reads, host_writes).unwrap()
}

/// Drives the host's end in a thread for as long as a client is there.
fn clients<const N: usize>(serve: fn(UnixStream)) -> ([UnixStream; N], thread::JoinHandle<()>) {
    let mut host = ends(serve);
    let clients = [(); N].map(|()| {
        let (ours, client) = UnixStream::pair().unwrap();
        let id = host.mux.open();
        host.attach(id, ours).unwrap();
        client
    });
    let driver = thread::spawn(move || {
        while !host.is_idle() {
            host.turn(&[], PollTimeout::NONE).unwrap();
        }
    });
    (clients, driver)
}

fn echo(mut stream: UnixStream) {
    let mut copy = stream.try_clone().unwrap();
    io::copy(&mut copy, &mut stream).unwrap();
    stream.write_all(b".").unwrap();
}

#[test]
fn much_goes_both_ways_and_half_a_connection_can_end() {
    let ([mut client], driver) = clients(echo);
    let sent: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
    let mut writer = client.try_clone().unwrap();
    let bytes = sent.clone();
    let writing = thread::spawn(move || {
        writer.write_all(&bytes).unwrap();
        writer.shutdown(Shutdown::Write).unwrap();
    });
    let mut received = Vec::new();
    client.read_to_end(&mut received).unwrap();
    writing.join().unwrap();
    assert!(received.len() == sent.len() + 1 && received[..sent.len()] == sent && received.ends_with(b"."));
    drop(client);
    driver.join().unwrap();
}

/// The opening and the end come in one piece.
#[test]
fn nothing_said_is_an_end_too() {
    let mut host = ends(echo);
    let (ours, mut client) = UnixStream::pair().unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let id = host.mux.open();
    host.attach(id, ours).unwrap();
    while !host.is_idle() {
        host.turn(&[], PollTimeout::NONE).unwrap();
    }
    let mut received = Vec::new();
    client.read_to_end(&mut received).unwrap();
    assert_eq!(received, b".");
}

#[test]
fn who_does_not_read_holds_nobody_up() {
    fn flood(mut stream: UnixStream) {
        let _ = stream.write_all(&vec![7; 8 << 20]);
    }
    let ([slow, mut quick], driver) = clients(flood);
    let mut received = Vec::new();
    quick.read_to_end(&mut received).unwrap();
    assert_eq!(received.len(), 8 << 20);
    drop((slow, quick));
    driver.join().unwrap();
}

#[test]
fn a_hang_up_gets_through_though_nobody_reads() {
    fn never_reads(stream: UnixStream) {
        // Woken by the hang-up alone.
        let mut fds = [PollFd::new(stream.as_fd(), PollFlags::empty())];
        poll(&mut fds, PollTimeout::NONE).unwrap();
        assert!(fds[0].revents().unwrap().contains(PollFlags::POLLHUP));
        let mut out = stream.try_clone().unwrap();
        assert!(out.write_all(b"x").is_err());
        GONE.store(true, std::sync::atomic::Ordering::SeqCst);
    }
    static GONE: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
    let ([mut client], driver) = clients(never_reads);
    client.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
    // Until the way is full.
    while client.write_all(&[0; 4096]).is_ok() {}
    drop(client);
    driver.join().unwrap();
    while !GONE.load(std::sync::atomic::Ordering::SeqCst) {
        thread::yield_now();
    }
}

#[test]
fn last_words_are_delivered_before_the_end() {
    fn says_and_goes(mut stream: UnixStream) {
        stream.write_all(&vec![9; 1 << 20]).unwrap();
    }
    let ([mut client], driver) = clients(says_and_goes);
    let mut received = Vec::new();
    client.read_to_end(&mut received).unwrap();
    assert_eq!(received.len(), 1 << 20);
    drop(client);
    driver.join().unwrap();
}

#[test]
fn a_guest_that_breaks_the_rules_ends_the_line() {
    let (host_reads, guest_writes) = pipe2(OFlag::O_CLOEXEC).unwrap();
    let (_guest_reads, host_writes) = pipe2(OFlag::O_CLOEXEC).unwrap();
    let mut host = Pump::new(Side::Host, host_reads, host_writes).unwrap();
    std::fs::File::from(guest_writes).write_all(&[0xff; 64]).unwrap();
    let error = host.turn(&[], PollTimeout::NONE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidData);
}
