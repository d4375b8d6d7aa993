//! GPU targets: the compute capability that a PTX module is made for.

use std::fmt;
use std::str::FromStr;

use crate::Error;

/// A PTX target.
///
/// A module for `sm_XX` runs on every GPU of compute capability X.X and later; a module for an
/// architecture-specific target (`sm_90a`) runs on that capability only. The PTX ISA version that a
/// target needs at least is in the "PTX ISA release history" of NVIDIA's PTX manual.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Arch {
    /// Compute capability 8.0: A100.
    Sm80,
    /// Compute capability 8.6: RTX 30.
    Sm86,
    /// Compute capability 8.9: RTX 40, L40.
    Sm89,
    /// Compute capability 9.0 alone, for its own instructions (`wgmma`): H100, H200.
    Sm90a,
    /// Compute capability 10.0: B200.
    Sm100,
    /// Compute capability 12.0: RTX 50.
    Sm120,
}

impl Arch {
    /// Every target that the builder knows, lowest first.
    pub const ALL: [Arch; 6] = [Arch::Sm80, Arch::Sm86, Arch::Sm89, Arch::Sm90a, Arch::Sm100, Arch::Sm120];

    /// The name that `llc -mcpu`, `ptxas -arch` and `.target` use.
    pub fn name(self) -> &'static str {
        match self {
            Arch::Sm80 => "sm_80",
            Arch::Sm86 => "sm_86",
            Arch::Sm89 => "sm_89",
            Arch::Sm90a => "sm_90a",
            Arch::Sm100 => "sm_100",
            Arch::Sm120 => "sm_120",
        }
    }

    /// Ten times the compute capability: 90 for `sm_90a`.
    pub fn compute_capability(self) -> u32 {
        match self {
            Arch::Sm80 => 80,
            Arch::Sm86 => 86,
            Arch::Sm89 => 89,
            Arch::Sm90a => 90,
            Arch::Sm100 => 100,
            Arch::Sm120 => 120,
        }
    }

    /// Whether the module runs on this exact capability only.
    pub fn is_arch_specific(self) -> bool {
        self == Arch::Sm90a
    }

    /// Parses a list such as `sm_80,9.0 120`; the result is sorted and has no duplicates.
    ///
    /// # Errors
    /// [`Error::UnknownArch`] for an element that names no target, or for an empty list.
    pub fn parse_list(list: &str) -> Result<Vec<Arch>, Error> {
        let mut archs = list
            .split(|c: char| c == ',' || c.is_whitespace())
            .filter(|name| !name.is_empty())
            .map(str::parse)
            .collect::<Result<Vec<Arch>, Error>>()?;
        if archs.is_empty() {
            return Err(Error::UnknownArch(list.to_owned()));
        }
        archs.sort_unstable();
        archs.dedup();
        Ok(archs)
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Arch {
    type Err = Error;

    /// Accepts `sm_90a`, `sm_90`, `compute_90`, `90` and `9.0`, in any case: of each capability there is one target.
    fn from_str(text: &str) -> Result<Arch, Error> {
        let lower = text.trim().to_ascii_lowercase();
        let bare = lower.strip_prefix("sm_").or_else(|| lower.strip_prefix("compute_")).unwrap_or(&lower);
        // `9.0` is `90`: the last digit of a capability is its minor number.
        let digits = match bare.split_once('.') {
            Some((major, minor)) if !major.is_empty() && minor.starts_with(|c: char| c.is_ascii_digit()) => {
                format!("{major}{minor}")
            }
            Some(_) => return Err(Error::UnknownArch(text.to_owned())),
            None => bare.to_owned(),
        };
        Arch::ALL
            .into_iter()
            .find(|arch| {
                let name = &arch.name()["sm_".len()..];
                name == digits || name.strip_suffix('a') == Some(&digits)
            })
            .ok_or_else(|| Error::UnknownArch(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// B46: the variable that names the GPUs.
    #[test]
    fn every_spelling_of_a_capability_is_accepted() {
        for text in ["90", "9.0", "sm_90", "SM_90a", "compute_90", " 90 "] {
            assert_eq!(text.parse::<Arch>().unwrap(), Arch::Sm90a, "{text}");
        }
        assert_eq!("12.0".parse::<Arch>().unwrap(), Arch::Sm120);
    }

    /// B46: nonsense in it.
    #[test]
    fn nonsense_is_a_clear_error() {
        for text in ["abc", "", "9", ".0", "9.", "sm_", "900", "9.0.0", "-90"] {
            let error = text.parse::<Arch>().unwrap_err().to_string();
            assert!(error.contains("sm_90") && error.contains(text.trim()), "{text}: {error}");
        }
    }

    #[test]
    fn a_list_is_sorted_and_deduplicated() {
        assert_eq!(Arch::parse_list("120, sm_80 8.0").unwrap(), [Arch::Sm80, Arch::Sm120]);
        assert!(Arch::parse_list(" , ").is_err());
        assert!(Arch::parse_list("90,abc").is_err());
    }
}
