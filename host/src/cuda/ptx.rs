//! What a PTX text says of itself, and whether a driver and a device can take it.
//!
//! A driver compiles PTX up to the ISA version of its own CUDA release, for targets up to the device's
//! compute capability. Both are checked from the text before the driver sees it, because the driver's
//! own answer ("unsupported PTX version") names neither side.
//!
//! Source: PTX ISA, "Release history" (version to CUDA release) and ".target".

use std::ffi::CString;
use std::fmt;

use super::driver::CudaVersion;

/// A version of the PTX instruction set, ordered by age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PtxVersion {
    /// Before the dot.
    pub major: u32,
    /// After the dot.
    pub minor: u32,
}

/// A `.target`: a compute capability, and whether code for it runs on later devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Target {
    /// Major and minor capability: `sm_90` is `(9, 0)`.
    pub capability: (u32, u32),
    /// How far the code carries.
    pub reach: Reach,
}

/// Which devices a target's code runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reach {
    /// The target and every later device.
    Onward,
    /// The target's own major version (suffix `f`).
    Family,
    /// Exactly the target (suffix `a`).
    Exact,
}

/// The header of a PTX text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// `.version`
    pub version: PtxVersion,
    /// `.target`
    pub target: Target,
    /// The kernels: the names after `.entry`.
    pub entries: Vec<CString>,
}

/// Why a PTX text cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PtxError {
    /// A directive is missing or malformed.
    #[error("not PTX: {0}")]
    Malformed(String),
    /// The driver is older than the PTX.
    #[error("the driver is too old for these kernels: it supports CUDA {driver}, whose PTX goes up to {supported}; the kernels are PTX {wanted}{}", needs(.wanted))]
    DriverTooOld {
        /// The driver's CUDA version.
        driver: CudaVersion,
        /// The newest PTX that it takes.
        supported: PtxVersion,
        /// The PTX's version.
        wanted: PtxVersion,
    },
    /// No text is for this device.
    #[error("no kernels for compute capability {}.{}: there {}", .device.0, .device.1, targets_note(.present))]
    NoTarget {
        /// The device's capability.
        device: (u32, u32),
        /// The targets that there are.
        present: Vec<String>,
    },
    /// A kernel folder cannot be read.
    #[error("{path}: {reason}")]
    File {
        /// The folder or file.
        path: String,
        /// Why.
        reason: String,
    },
}

/// The first PTX version and CUDA release of each step, oldest first.
const RELEASES: [(PtxVersion, CudaVersion); 20] = [
    release(7, 0, 11, 0),
    release(7, 1, 11, 1),
    release(7, 2, 11, 2),
    release(7, 3, 11, 3),
    release(7, 4, 11, 4),
    release(7, 5, 11, 5),
    release(7, 6, 11, 6),
    release(7, 7, 11, 7),
    release(7, 8, 11, 8),
    release(8, 0, 12, 0),
    release(8, 1, 12, 1),
    release(8, 2, 12, 2),
    release(8, 3, 12, 3),
    release(8, 4, 12, 4),
    release(8, 5, 12, 5),
    release(8, 6, 12, 7),
    release(8, 7, 12, 8),
    release(8, 8, 12, 9),
    release(9, 0, 13, 0),
    release(9, 1, 13, 1),
];

/// What drivers before CUDA 11 took.
const BEFORE_RELEASES: PtxVersion = PtxVersion { major: 6, minor: 5 };

const fn release(ptx_major: u32, ptx_minor: u32, major: u32, minor: u32) -> (PtxVersion, CudaVersion) {
    (PtxVersion { major: ptx_major, minor: ptx_minor }, CudaVersion { major, minor })
}

/// The newest PTX that a driver of this CUDA version is known to take; `None` for a driver newer than
/// the table, which may take more.
pub fn newest_for(driver: CudaVersion) -> Option<PtxVersion> {
    if driver > RELEASES[RELEASES.len() - 1].1 {
        return None;
    }
    let known = RELEASES.iter().rev().find(|(_, cuda)| *cuda <= driver);
    Some(known.map_or(BEFORE_RELEASES, |(ptx, _)| *ptx))
}

/// Checks that a driver takes PTX of this version.
///
/// # Errors
/// [`PtxError::DriverTooOld`]. A driver newer than the table is left to answer for itself, unless the
/// PTX is of a generation that it cannot have: PTX 7 came with CUDA 11, 8 with 12, 9 with 13.
pub fn check_version(wanted: PtxVersion, driver: CudaVersion) -> Result<(), PtxError> {
    let (taken, supported) = match newest_for(driver) {
        Some(newest) => (wanted <= newest, newest),
        None => {
            let same_age = PtxVersion { major: driver.major.saturating_sub(4), minor: driver.minor };
            (wanted.major <= same_age.major, same_age)
        }
    };
    if taken { Ok(()) } else { Err(PtxError::DriverTooOld { driver, supported, wanted }) }
}

/// The CUDA release that brought this PTX version.
fn needs(wanted: &PtxVersion) -> String {
    match RELEASES.iter().find(|(ptx, _)| ptx >= wanted) {
        Some((_, cuda)) => format!(", which needs a driver for CUDA {cuda} or later"),
        None => ", which no CUDA release known to this program takes".to_owned(),
    }
}

fn targets_note(present: &[String]) -> String {
    if present.is_empty() { "are none".to_owned() } else { format!("are {}", present.join(", ")) }
}

impl Target {
    /// Reads `sm_90`, `sm_90a` or `sm_120f`.
    pub fn parse(text: &str) -> Option<Target> {
        let digits = text.strip_prefix("sm_")?;
        let (digits, reach) = match digits.as_bytes().last()? {
            b'a' => (&digits[..digits.len() - 1], Reach::Exact),
            b'f' => (&digits[..digits.len() - 1], Reach::Family),
            _ => (digits, Reach::Onward),
        };
        if !(2..=4).contains(&digits.len()) || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        let number: u32 = digits.parse().ok()?;
        Some(Target { capability: (number / 10, number % 10), reach })
    }

    /// Whether code for this target runs on a device of this compute capability.
    pub fn runs_on(self, device: (u32, u32)) -> bool {
        match self.reach {
            Reach::Onward => self.capability <= device,
            Reach::Family => self.capability.0 == device.0 && self.capability <= device,
            Reach::Exact => self.capability == device,
        }
    }
}

impl Header {
    /// Reads version, target and entries from a PTX text.
    ///
    /// # Errors
    /// [`PtxError::Malformed`] where a directive is missing or unreadable.
    pub fn parse(text: &str) -> Result<Header, PtxError> {
        let malformed = |what: &str| PtxError::Malformed(what.to_owned());
        let (mut version, mut target, mut entries) = (None, None, Vec::new());
        for line in text.lines() {
            let line = line.split("//").next().unwrap_or("").trim();
            if let Some(rest) = line.strip_prefix(".version") {
                version = Some(PtxVersion::parse(rest.trim()).ok_or_else(|| malformed("unreadable .version"))?);
            } else if let Some(rest) = line.strip_prefix(".target") {
                let first = rest.split(',').next().unwrap_or("").trim();
                target = Some(Target::parse(first).ok_or_else(|| malformed("unreadable .target"))?);
            } else if let Some((_, rest)) = line.split_once(".entry") {
                let name = rest.split('(').next().unwrap_or("").trim();
                let name = CString::new(name).ok().filter(|name| !name.is_empty());
                entries.push(name.ok_or_else(|| malformed("an .entry without a name"))?);
            }
        }
        Ok(Header {
            version: version.ok_or_else(|| malformed("no .version"))?,
            target: target.ok_or_else(|| malformed("no .target"))?,
            entries,
        })
    }
}

impl PtxVersion {
    /// Reads `8.0`.
    pub fn parse(text: &str) -> Option<PtxVersion> {
        let (major, minor) = text.split_once('.')?;
        Some(PtxVersion { major: major.parse().ok()?, minor: minor.parse().ok()? })
    }
}

impl fmt::Display for PtxVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = match self.reach {
            Reach::Onward => "",
            Reach::Family => "f",
            Reach::Exact => "a",
        };
        write!(f, "sm_{}{}{suffix}", self.capability.0, self.capability.1)
    }
}
