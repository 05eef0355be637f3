//! Compression: which one it is, and undoing it within bounds.

use std::io::{self, BufReader, Read};

use super::digest::Hashing;
use super::{Bounds, Error};

/// Most memory for one xz dictionary; zstd's window is bounded to 128 MiB by its library.
const XZ_KIB: u32 = 128 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Packing {
    Plain,
    Gzip,
    Zstd,
    Xz,
}

impl Packing {
    /// By the first bytes of a file; six are enough.
    pub fn of_bytes(first: &[u8]) -> Self {
        match first {
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Self::Zstd,
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Self::Xz,
            _ => Self::Plain,
        }
    }

    /// By the media type of a layer.
    ///
    /// # Errors
    /// [`Error::MediaType`] for any other, layers that are not to be passed on among them.
    pub fn of_media_type(media_type: &str) -> Result<Self, Error> {
        match media_type {
            "application/vnd.oci.image.layer.v1.tar" | "application/vnd.docker.image.rootfs.diff.tar" => {
                Ok(Self::Plain)
            }
            "application/vnd.oci.image.layer.v1.tar+gzip" | "application/vnd.docker.image.rootfs.diff.tar.gzip" => {
                Ok(Self::Gzip)
            }
            "application/vnd.oci.image.layer.v1.tar+zstd" | "application/vnd.docker.image.rootfs.diff.tar.zstd" => {
                Ok(Self::Zstd)
            }
            other => Err(Error::MediaType(other.to_owned())),
        }
    }
}

/// What is packed in `from`, bounded in its ratio.
pub(super) fn unpacked<R: Read + 'static>(
    packing: Packing,
    from: Hashing<R>,
    bounds: &Bounds,
) -> io::Result<Box<dyn Read>> {
    let buffered = BufReader::with_capacity(256 << 10, from.clone());
    let inflated: Box<dyn Read> = match packing {
        Packing::Plain => return Ok(Box::new(buffered)),
        Packing::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(buffered)),
        Packing::Zstd => Box::new(zstd::Decoder::with_buffer(buffered)?),
        Packing::Xz => Box::new(lzma_rust2::XzReader::new_mem_limit(buffered, true, XZ_KIB)),
    };
    Ok(Box::new(Ratio {
        from: inflated,
        packed: from,
        unpacked: 0,
        ratio: bounds.ratio,
    }))
}

/// Stops where too much comes out of too little.
struct Ratio<R> {
    from: Box<dyn Read>,
    packed: Hashing<R>,
    unpacked: u64,
    ratio: u64,
}

impl<R: Read> Read for Ratio<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let got = self.from.read(into)?;
        self.unpacked += got as u64;
        if self.unpacked > Bounds::SMALL && self.unpacked / self.ratio > self.packed.count() {
            return Err(io::Error::other(Error::Bomb { ratio: self.ratio }));
        }
        Ok(got)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn through(packing: Packing, packed: Vec<u8>) -> io::Result<Vec<u8>> {
        let mut whole = Vec::new();
        unpacked(packing, Hashing::new(io::Cursor::new(packed)), &Bounds::default())?.read_to_end(&mut whole)?;
        Ok(whole)
    }

    #[test]
    fn a_bomb_is_stopped_before_it_is_unpacked() {
        // 1 TiB of zeros would come out of frames like these; it is cut off at the small size.
        let zeros = vec![0; 64 << 20];
        let frame = zstd::encode_all(zeros.as_slice(), 1).unwrap();
        let bomb: Vec<u8> = frame.iter().copied().cycle().take(frame.len() * 16).collect();
        let mut count = 0;
        let mut reader = unpacked(Packing::Zstd, Hashing::new(io::Cursor::new(bomb)), &Bounds::default()).unwrap();
        let mut chunk = vec![0; 1 << 20];
        let error = loop {
            match reader.read(&mut chunk) {
                Ok(0) => panic!("it all came out"),
                Ok(got) => count += got as u64,
                Err(error) => break error,
            }
        };
        assert!(matches!(Error::tar(error), Error::Bomb { ratio: 250 }));
        assert!(count <= Bounds::SMALL);
    }

    #[test]
    fn every_packing_is_told_and_undone() {
        let text = b"hello".repeat(100);
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        io::Write::write_all(&mut gzip, &text).unwrap();
        // What `printf hello | xz -9` gives.
        let xz = [
            0xfd, 0x37, 0x7a, 0x58, 0x5a, 0x00, 0x00, 0x04, 0xe6, 0xd6, 0xb4, 0x46, 0x02, 0x00, 0x21, 0x01, 0x1c, 0x00,
            0x00, 0x00, 0x10, 0xcf, 0x58, 0xcc, 0x01, 0x00, 0x04, 0x68, 0x65, 0x6c, 0x6c, 0x6f, 0x00, 0x00, 0x00, 0x00,
            0xb1, 0x37, 0xb9, 0xdb, 0xe5, 0xda, 0x1e, 0x9b, 0x00, 0x01, 0x1d, 0x05, 0xb8, 0x2d, 0x80, 0xaf, 0x1f, 0xb6,
            0xf3, 0x7d, 0x01, 0x00, 0x00, 0x00, 0x00, 0x04, 0x59, 0x5a,
        ];
        assert_eq!(Packing::of_bytes(&xz), Packing::Xz);
        assert_eq!(through(Packing::Xz, xz.to_vec()).unwrap(), b"hello");
        for (packing, packed) in [
            (Packing::Gzip, gzip.finish().unwrap()),
            (Packing::Zstd, zstd::encode_all(text.as_slice(), 3).unwrap()),
            (Packing::Plain, text.clone()),
        ] {
            assert_eq!(Packing::of_bytes(&packed), packing);
            assert_eq!(through(packing, packed).unwrap(), text);
        }
    }

    #[test]
    fn unknown_media_types_are_refused_by_name() {
        for media_type in [
            "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
            "application/vnd.oci.image.layer.v1.tar+bzip2",
            "application/wasm",
        ] {
            let refused = Packing::of_media_type(media_type).unwrap_err().to_string();
            assert!(refused.contains(media_type), "{refused}");
        }
    }
}
