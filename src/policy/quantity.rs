//! Sizes and durations as people write them, and back.

use std::time::Duration;

use bytesize::ByteSize;

/// Reads `512MiB`, `2 GB` or a plain number of bytes.
pub fn parse_size(text: &str) -> Result<u64, String> {
    match text.trim().parse::<ByteSize>() {
        Ok(size) => Ok(size.as_u64()),
        Err(_) => Err(format!("`{text}` is not a size: write it like `512MiB` or `2GB`")),
    }
}

/// Reads `90s`, `10m` or `1h 30m`; parts of a millisecond are dropped.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text.trim()) {
        Ok(duration) => Ok(Duration::from_millis(
            u64::try_from(duration.as_millis()).unwrap_or(u64::MAX),
        )),
        Err(_) => Err(format!(
            "`{text}` is not a duration: write it like `90s`, `10m` or `1h 30m`"
        )),
    }
}

/// Prints exactly, in the largest unit that divides it.
pub fn show_size(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let exact = units
        .iter()
        .find(|(bits, _)| bytes != 0 && bytes.is_multiple_of(1 << bits));
    match exact {
        Some((bits, unit)) => format!("{}{unit}", bytes >> bits),
        None => format!("{bytes}B"),
    }
}

pub fn show_duration(duration: Duration) -> String {
    humantime::format_duration(duration).to_string()
}

/// Serde for a duration that may be left out, as people write it.
pub mod optional_duration {
    use std::time::Duration;

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(value: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
        value.map(super::show_duration).serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
        let text = Option::<String>::deserialize(from)?;
        text.map(|text| super::parse_duration(&text).map_err(D::Error::custom))
            .transpose()
    }
}

pub fn show_usd(micros: u64) -> String {
    format!("${}", micros as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_prints_as_what_it_parses_from() {
        for (text, bytes, printed) in [
            ("512MiB", 512 << 20, "512MiB"),
            ("0.5 GiB", 512 << 20, "512MiB"),
            ("1GB", 1_000_000_000, "1000000000B"),
            ("2048", 2048, "2KiB"),
            ("0", 0, "0B"),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
            assert_eq!(show_size(bytes), printed);
            assert_eq!(parse_size(printed), Ok(bytes));
        }
        for bad in ["", "lots", "-1GiB", "1.2.3MiB", "5 parsecs", "NaN"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
        assert_eq!(
            parse_size("99999999999999999999EiB"),
            Ok(u64::MAX),
            "saturates, the range check refuses it"
        );
    }

    #[test]
    fn a_duration_prints_as_what_it_parses_from() {
        assert_eq!(parse_duration("1h 30m"), Ok(Duration::from_secs(5400)));
        assert_eq!(show_duration(Duration::from_secs(5400)), "1h 30m");
        for bad in ["", "10", "-5s", "soon", "99999999999999999999s"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }
}
