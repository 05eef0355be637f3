//! Questions and answers of DNS (RFC 1035), as few of them as are needed: one question in, at most one address out.

use std::net::Ipv4Addr;

const HEADER: usize = 12;
pub const A: u16 = 1;
pub const AAAA: u16 = 28;
const OPT: u16 = 41;
const IN: u16 = 1;
/// "Prohibited" (RFC 8914, 4.16).
const PROHIBITED: u16 = 15;

/// One question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Query {
    id: u16,
    recursion: bool,
    /// Labels with dots between them; any bytes.
    pub name: Vec<u8>,
    pub kind: u16,
    /// The question section as it was sent.
    question: Vec<u8>,
    extended: bool,
}

/// What is said to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer<'a> {
    Address(Ipv4Addr),
    /// The name is there, and has nothing of this kind.
    Nothing,
    NoName(&'a str),
    Refused(&'a str),
}

/// What gets no proper answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Bad {
    /// Not even an id, or it is an answer itself: nothing is said.
    Silence,
    /// Goes back as a format error.
    Format([u8; HEADER]),
}

/// Reads one message.
///
/// # Errors
/// It is not one plain question.
pub fn parse(bytes: &[u8]) -> Result<Query, Bad> {
    let Some((header, mut rest)) = bytes.split_at_checked(HEADER) else {
        return Err(Bad::Silence);
    };
    if header[2] & 0x80 != 0 {
        return Err(Bad::Silence);
    }
    let mut error = [0; HEADER];
    error[..2].copy_from_slice(&header[..2]);
    (error[2], error[3]) = (0x80, 1);
    let bad = || Bad::Format(error);
    // A standard query with one question, nothing else but perhaps an OPT record.
    let counts = &header[4..];
    if header[2] & 0x7a != 0 || counts[..2] != [0, 1] || counts[2..6] != [0; 4] || counts[6] != 0 || counts[7] > 1 {
        return Err(bad());
    }
    let mut name = Vec::new();
    loop {
        let (length, after) = rest.split_first().ok_or_else(bad)?;
        let length = usize::from(*length);
        if length == 0 {
            rest = after;
            break;
        }
        // No pointers in a question.
        if length > 63 {
            return Err(bad());
        }
        let (label, after) = after.split_at_checked(length).ok_or_else(bad)?;
        if !name.is_empty() {
            name.push(b'.');
        }
        // A dot inside of a label would read as two.
        if label.contains(&b'.') {
            return Err(bad());
        }
        name.extend_from_slice(label);
        rest = after;
        if name.len() > 253 {
            return Err(bad());
        }
    }
    let (tail, after) = rest.split_at_checked(4).ok_or_else(bad)?;
    if tail[2..] != IN.to_be_bytes() {
        return Err(bad());
    }
    let question = bytes[HEADER..bytes.len() - after.len()].to_vec();
    let extended = counts[7] == 1;
    let is_opt = matches!(after, [0, high, low, ..] if [*high, *low] == OPT.to_be_bytes()) && after.len() >= 11;
    if extended != is_opt || (!extended && !after.is_empty()) {
        return Err(bad());
    }
    Ok(Query {
        id: u16::from_be_bytes([header[0], header[1]]),
        recursion: header[2] & 1 != 0,
        name,
        kind: u16::from_be_bytes([tail[0], tail[1]]),
        question,
        extended,
    })
}

impl Query {
    /// The message that answers it, of at most 512 bytes.
    pub fn answer(&self, answer: &Answer<'_>, ttl: u32) -> Vec<u8> {
        let (code, rule) = match answer {
            Answer::Address(_) | Answer::Nothing => (0, None),
            Answer::NoName(rule) => (3, Some(rule)),
            Answer::Refused(rule) => (5, Some(rule)),
        };
        let address = match answer {
            Answer::Address(address) => Some(address),
            Answer::Nothing | Answer::NoName(_) | Answer::Refused(_) => None,
        };
        let mut out = self.id.to_be_bytes().to_vec();
        out.extend([0x80 | u8::from(self.recursion), 0x80 | code]);
        out.extend([0, 1, 0, u8::from(address.is_some()), 0, 0, 0, u8::from(self.extended)]);
        out.extend(&self.question);
        if let Some(address) = address {
            // The name of the question, by a pointer.
            out.extend([0xc0, HEADER as u8]);
            out.extend(A.to_be_bytes());
            out.extend(IN.to_be_bytes());
            out.extend(ttl.to_be_bytes());
            out.extend(4u16.to_be_bytes());
            out.extend(address.octets());
        }
        if self.extended {
            let text = rule.map(|rule| &rule.as_bytes()[..rule.len().min(120)]);
            let option = text.map_or(0, |text| 6 + text.len() as u16);
            out.push(0);
            out.extend(OPT.to_be_bytes());
            out.extend(1232u16.to_be_bytes());
            out.extend([0; 4]);
            out.extend(option.to_be_bytes());
            if let Some(text) = text {
                out.extend(15u16.to_be_bytes());
                out.extend((2 + text.len() as u16).to_be_bytes());
                out.extend(PROHIBITED.to_be_bytes());
                out.extend(text);
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use hickory_resolver::proto::op::{Edns, Message, Query as Question};
    use hickory_resolver::proto::rr::{Name, RData, RecordType};
    use proptest::prelude::*;

    use super::*;

    fn asked(name: &str, kind: RecordType, extended: bool) -> Vec<u8> {
        let mut message = Message::query();
        message.add_query(Question::query(Name::from_ascii(name).unwrap(), kind));
        if extended {
            message.set_edns(Edns::new());
        }
        message.to_vec().unwrap()
    }

    /// What we write, another library reads.
    #[test]
    fn an_answer_is_read_by_others() {
        let query = parse(&asked("API.example.com.", RecordType::A, true)).unwrap();
        assert_eq!((query.name.as_slice(), query.kind), (&b"API.example.com"[..], A));
        let answer = Message::from_vec(&query.answer(&Answer::Address([198, 18, 0, 1].into()), 60)).unwrap();
        assert_eq!(answer.answers.len(), 1);
        assert_eq!(
            answer.answers[0].data,
            RData::A(std::net::Ipv4Addr::new(198, 18, 0, 1).into())
        );
        assert_eq!(answer.answers[0].ttl, 60);
        for (said, code) in [
            (Answer::NoName("r-1"), 3),
            (Answer::Refused("r-1"), 5),
            (Answer::Nothing, 0),
        ] {
            for extended in [true, false] {
                let query = parse(&asked("a.example.", RecordType::TXT, extended)).unwrap();
                let bytes = query.answer(&said, 60);
                let answer = Message::from_vec(&bytes).unwrap();
                assert_eq!(u16::from(answer.metadata.response_code), code);
                let told = bytes.windows(3).any(|three| three == b"r-1");
                assert_eq!(told, extended && code != 0);
            }
        }
    }

    #[test]
    fn what_is_not_one_plain_question_is_refused() {
        let good = asked("a.example.", RecordType::A, false);
        assert_eq!(parse(&good[..11]), Err(Bad::Silence));
        let change = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            parse(&bytes)
        };
        assert_eq!(change(2, 0x80), Err(Bad::Silence));
        // Opcode, counts, a pointer, a dot in a label, another class.
        for (at, byte) in [
            (2, 0x28),
            (5, 2),
            (5, 0),
            (7, 1),
            (9, 1),
            (11, 2),
            (12, 0xc0),
            (15, b'.'),
            (good.len() - 1, 3),
        ] {
            assert!(matches!(change(at, byte), Err(Bad::Format(_))), "{at} {byte}");
        }
        assert!(matches!(parse(&[&good[..], b"x"].concat()), Err(Bad::Format(_))));
    }

    proptest! {
        /// It reads less than hickory, and what it reads it reads alike.
        #[test]
        fn it_agrees_with_hickory(at in 0usize..40, byte: u8, noise in proptest::collection::vec(any::<u8>(), 0..40)) {
            let _ = parse(&noise);
            let mut bytes = asked("ab.example.", RecordType::A, true);
            let at = at.min(bytes.len() - 1);
            bytes[at] = byte;
            if let (Ok(query), Ok(message)) = (parse(&bytes), Message::from_vec(&bytes)) {
                prop_assert_eq!(message.queries.len(), 1);
                prop_assert_eq!(u16::from(message.queries[0].query_type()), query.kind);
                let labels: Vec<Vec<u8>> = message.queries[0].name().iter().map(<[u8]>::to_vec).collect();
                prop_assert_eq!(labels.join(&b'.'), query.name);
            }
        }
    }
}
