//! A byte stream without its packing, and with bounds: what stands between an upload and the reader of archives.

use std::io::{self, BufRead, BufReader, Read};

use super::error::Error;
use super::unarchive::Refusal;

/// How many bytes one packed byte may become.
pub(super) const RATIO: u64 = 200;
/// Up to this many bytes, any ratio is fine.
pub(super) const FREE: u64 = 64 << 20;
/// The stream without its packing, bounded in size and in ratio.
pub(super) fn unpacked(stream: &mut dyn Read, most: u64) -> Result<impl Read, Error> {
    let mut stream = BufReader::with_capacity(128 << 10, Counted { stream, count: 0 });
    let magic = stream.fill_buf().map_err(Error::Source)?;
    let (gzip, zstd) = (
        magic.starts_with(&[0x1f, 0x8b]),
        magic.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]),
    );
    let packing = if gzip {
        Packing::Gzip(Box::new(flate2::bufread::MultiGzDecoder::new(stream)))
    } else if zstd {
        let mut decoder = zstd::Decoder::with_buffer(stream).map_err(Error::Source)?;
        // 128 MiB, what the zstd program takes without being told to.
        decoder.window_log_max(27).map_err(Error::Source)?;
        Packing::Zstd(Box::new(decoder))
    } else {
        Packing::None(stream)
    };
    Ok(Bounded {
        packing,
        count: 0,
        most,
    })
}

struct Counted<'a> {
    stream: &'a mut dyn Read,
    count: u64,
}

impl Read for Counted<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self
            .stream
            .read(buffer)
            .map_err(|e| io::Error::new(e.kind(), Upstream(e)))?;
        self.count += read as u64;
        Ok(read)
    }
}

/// The caller's stream failed: told apart from an archive that is no good.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub(super) struct Upstream(io::Error);

enum Packing<'a> {
    None(BufReader<Counted<'a>>),
    Gzip(Box<flate2::bufread::MultiGzDecoder<BufReader<Counted<'a>>>>),
    Zstd(Box<zstd::Decoder<'static, BufReader<Counted<'a>>>>),
}

struct Bounded<'a> {
    packing: Packing<'a>,
    count: u64,
    most: u64,
}

impl Read for Bounded<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = match &mut self.packing {
            Packing::None(stream) => stream.read(buffer),
            Packing::Gzip(decoder) => decoder.read(buffer),
            Packing::Zstd(decoder) => decoder.read(buffer),
        }?;
        self.count += read as u64;
        let packed = match &self.packing {
            Packing::None(_) => self.count,
            Packing::Gzip(decoder) => decoder.get_ref().get_ref().count,
            Packing::Zstd(decoder) => decoder.get_ref().get_ref().count,
        };
        if self.count > FREE && self.count / RATIO > packed {
            return Err(io::Error::other(Refusal::Ratio));
        }
        if self.count > self.most {
            return Err(io::Error::other(Refusal::Endless));
        }
        Ok(read)
    }
}
