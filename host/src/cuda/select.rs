//! Which GPU: `--device cuda:…`.

use std::fmt;
use std::str::FromStr;

use super::device::DeviceInfo;
use super::error::{Error, Result};

/// A choice among the devices that the driver shows. `CUDA_VISIBLE_DEVICES` has already been applied by
/// the driver: indices count the visible devices only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Selector {
    /// The device with the most free memory, the lower index among equals.
    #[default]
    MostFree,
    /// By position.
    Index(u32),
    /// By UUID, or the beginning of one.
    Uuid(String),
    /// The most free of those with this compute capability.
    Capability(u32, u32),
}

/// A selector that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} selects no device: use an index, a UUID (GPU-…), a compute capability (sm_90), or most-free")]
pub struct SelectorError(String);

impl FromStr for Selector {
    type Err = SelectorError;

    fn from_str(text: &str) -> std::result::Result<Self, SelectorError> {
        let invalid = || SelectorError(text.chars().take(80).collect());
        let trimmed = text.trim();
        if trimmed.is_empty() || trimmed == "most-free" {
            return Ok(Selector::MostFree);
        }
        if let Some(capability) = trimmed.strip_prefix("sm_") {
            let number: u32 = capability.parse().map_err(|_| invalid())?;
            return if number >= 10 { Ok(Selector::Capability(number / 10, number % 10)) } else { Err(invalid()) };
        }
        if trimmed.get(..4).is_some_and(|prefix| prefix.eq_ignore_ascii_case("GPU-")) {
            let id = trimmed[4..].to_ascii_lowercase();
            let is_hex = !id.is_empty() && id.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-');
            return if is_hex { Ok(Selector::Uuid(format!("GPU-{id}"))) } else { Err(invalid()) };
        }
        if let Some((major, minor)) = trimmed.split_once('.') {
            return match (major.parse(), minor.parse()) {
                (Ok(major), Ok(minor)) => Ok(Selector::Capability(major, minor)),
                _ => Err(invalid()),
            };
        }
        trimmed.parse().map(Selector::Index).map_err(|_| invalid())
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Selector::MostFree => f.write_str("most-free"),
            Selector::Index(index) => write!(f, "number {index}"),
            Selector::Uuid(uuid) => f.write_str(uuid),
            Selector::Capability(major, minor) => write!(f, "of compute capability {major}.{minor}"),
        }
    }
}

impl Selector {
    /// The chosen one of `devices`.
    ///
    /// # Errors
    /// [`Error::NoDevice`] of an empty list, [`Error::NotSelected`] where none fits.
    pub fn choose<'a>(&self, devices: &'a [DeviceInfo]) -> Result<&'a DeviceInfo> {
        if devices.is_empty() {
            return Err(Error::NoDevice);
        }
        let fits = |device: &&DeviceInfo| match self {
            Selector::MostFree => true,
            Selector::Index(index) => device.index == *index,
            Selector::Uuid(uuid) => device.uuid.starts_with(uuid.as_str()),
            Selector::Capability(major, minor) => device.properties.capability == (*major, *minor),
        };
        // `max_by_key` keeps the last of equals, so the list is walked from its end.
        devices.iter().rev().filter(fits).max_by_key(|device| device.memory.free_bytes).ok_or_else(|| {
            Error::NotSelected {
                selector: self.to_string(),
                present: devices.iter().map(DeviceInfo::to_string).collect(),
            }
        })
    }
}
