//! Range-checked reading of one architecture's keys.

use std::ops::RangeInclusive;

use super::{Arch, ConfigError};
use crate::gguf::{Gguf, Value};

/// The keys `{arch}.…` of a file.
pub(super) struct Keys<'a> {
    pub(super) gguf: &'a Gguf,
    pub(super) arch: Arch,
}

impl<'a> Keys<'a> {
    pub(super) fn new(gguf: &'a Gguf, arch: Arch) -> Keys<'a> {
        Keys { gguf, arch }
    }

    /// The full name of a key.
    pub(super) fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.arch.name())
    }

    /// An error about a key.
    pub(super) fn problem(&self, key: &str, problem: String) -> ConfigError {
        let file = self.gguf.path().display().to_string();
        ConfigError::Key { file, key: self.full(key), problem }
    }

    /// An error about a tensor.
    pub(super) fn tensor_problem(&self, tensor: &str, problem: String) -> ConfigError {
        let file = self.gguf.path().display().to_string();
        ConfigError::Tensor { file, tensor: tensor.to_owned(), problem }
    }

    fn in_range(&self, key: &str, value: u32, range: &RangeInclusive<u32>) -> Result<usize, ConfigError> {
        if range.contains(&value) {
            return Ok(value as usize);
        }
        let problem = format!("{value} is not in {} to {}", range.start(), range.end());
        Err(self.problem(key, problem))
    }

    pub(super) fn size(&self, key: &str, range: RangeInclusive<u32>) -> Result<usize, ConfigError> {
        self.in_range(key, self.gguf.u32(&self.full(key))?, &range)
    }

    pub(super) fn opt_size(&self, key: &str, range: RangeInclusive<u32>) -> Result<Option<usize>, ConfigError> {
        let value = self.gguf.opt_u32(&self.full(key))?;
        value.map(|value| self.in_range(key, value, &range)).transpose()
    }

    pub(super) fn size_or(&self, key: &str, range: RangeInclusive<u32>, default: usize) -> Result<usize, ConfigError> {
        Ok(self.opt_size(key, range)?.unwrap_or(default))
    }

    /// A size that may be given once, or once for each block and then the same for all.
    pub(super) fn uniform_size(
        &self,
        key: &str,
        n_block: usize,
        range: RangeInclusive<u32>,
    ) -> Result<Option<usize>, ConfigError> {
        let full = self.full(key);
        let Some(Value::Array(array)) = self.gguf.get(&full) else {
            return self.opt_size(key, range);
        };
        if array.len() != n_block {
            let problem = format!("{} values for {n_block} blocks", array.len());
            return Err(self.problem(key, problem));
        }
        let values = self.gguf.u32s(&full)?;
        if values.iter().any(|value| *value != values[0]) {
            return Err(self.problem(key, "differs between layers".to_owned()));
        }
        self.in_range(key, values[0], &range).map(Some)
    }

    pub(super) fn required_uniform(
        &self,
        key: &str,
        n_block: usize,
        range: RangeInclusive<u32>,
    ) -> Result<usize, ConfigError> {
        match self.uniform_size(key, n_block, range.clone())? {
            Some(size) => Ok(size),
            // Missing: let the plain getter say so.
            None => self.size(key, range),
        }
    }

    pub(super) fn opt_u64(&self, key: &str) -> Result<Option<u64>, ConfigError> {
        Ok(self.gguf.opt_u64(&self.full(key))?)
    }

    pub(super) fn bool_or(&self, key: &str, default: bool) -> Result<bool, ConfigError> {
        Ok(self.gguf.opt_bool(&self.full(key))?.unwrap_or(default))
    }

    pub(super) fn opt_str(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        Ok(self.gguf.opt_str(&self.full(key))?)
    }

    /// A float in a range; NaN is in none.
    pub(super) fn opt_float_in(&self, key: &str, range: RangeInclusive<f32>) -> Result<Option<f32>, ConfigError> {
        match self.gguf.opt_f32(&self.full(key))? {
            Some(value) if !range.contains(&value) => {
                let problem = format!("{value} is not in {} to {}", range.start(), range.end());
                Err(self.problem(key, problem))
            }
            value => Ok(value),
        }
    }

    pub(super) fn float_in(&self, key: &str, range: RangeInclusive<f32>) -> Result<f32, ConfigError> {
        match self.opt_float_in(key, range)? {
            Some(value) => Ok(value),
            // Missing: let the plain getter say so.
            None => Ok(self.gguf.f32(&self.full(key))?),
        }
    }

    pub(super) fn float_or(&self, key: &str, range: RangeInclusive<f32>, default: f32) -> Result<f32, ConfigError> {
        Ok(self.opt_float_in(key, range)?.unwrap_or(default))
    }
}
