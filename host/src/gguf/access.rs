//! Typed access to metadata. Integer getters take any of GGUF's integer types, because writers differ:
//! a count may be u16, u32, i32 or u64.

use super::{Array, ErrorKind, Gguf, Result, Value};

impl Gguf {
    /// All keys with their values, sorted by key.
    pub fn metadata(&self) -> impl ExactSizeIterator<Item = (&str, Value<'_>)> {
        let file: &[u8] = &self.shards[0].bytes;
        self.pairs.iter().map(move |(key, stored)| (&**key, stored.view(file)))
    }

    /// The value of `key`, as the file has it.
    pub fn get(&self, key: &str) -> Option<Value<'_>> {
        self.pairs.get(key).map(|stored| stored.view(&self.shards[0].bytes))
    }

    /// `general.architecture`.
    ///
    /// # Errors
    /// As [`Gguf::str`].
    pub fn arch(&self) -> Result<&str> {
        self.str("general.architecture")
    }

    fn required<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| self.error(ErrorKind::KeyMissing(key.to_owned())))
    }

    fn wrong_type(&self, key: &str, found: Value<'_>, wanted: &'static str) -> super::GgufError {
        self.error(ErrorKind::KeyType { key: key.to_owned(), found: found.describe(), wanted })
    }

    fn to_int<T: TryFrom<i128>>(&self, key: &str, value: Value<'_>, wanted: &'static str) -> Result<T> {
        let value = value.int().ok_or_else(|| self.wrong_type(key, value, "an integer"))?;
        T::try_from(value).map_err(|_| self.error(ErrorKind::KeyRange { key: key.to_owned(), value, wanted }))
    }

    fn to_f32(&self, key: &str, value: Value<'_>) -> Result<f32> {
        let value = value.float().ok_or_else(|| self.wrong_type(key, value, "a float"))?;
        Ok(value as f32)
    }

    fn to_str<'a>(&self, key: &str, value: Value<'a>, index: Option<usize>) -> Result<&'a str> {
        let Value::String(bytes) = value else {
            return Err(self.wrong_type(key, value, "a string"));
        };
        std::str::from_utf8(bytes).map_err(|_| {
            let element = index.map(|i| format!("element {i} is ")).unwrap_or_default();
            self.error(ErrorKind::KeyUtf8 { key: key.to_owned(), element })
        })
    }

    /// An integer that must fit u32.
    ///
    /// # Errors
    /// If the key is missing, or is not an integer from 0 to 2³²−1. The other getters are alike.
    pub fn u32(&self, key: &str) -> Result<u32> {
        self.required(key, self.opt_u32(key)?)
    }

    /// As [`Gguf::u32`], `None` if the key is missing.
    ///
    /// # Errors
    /// If the value is not an integer or out of range. The other `opt_` getters are alike.
    pub fn opt_u32(&self, key: &str) -> Result<Option<u32>> {
        self.get(key).map(|value| self.to_int(key, value, "u32")).transpose()
    }

    /// An integer that must fit u64.
    ///
    /// # Errors
    /// As [`Gguf::opt_u32`].
    pub fn opt_u64(&self, key: &str) -> Result<Option<u64>> {
        self.get(key).map(|value| self.to_int(key, value, "u64")).transpose()
    }

    /// A float; f64 is rounded.
    ///
    /// # Errors
    /// As [`Gguf::u32`].
    pub fn f32(&self, key: &str) -> Result<f32> {
        self.required(key, self.opt_f32(key)?)
    }

    /// As [`Gguf::f32`], `None` if the key is missing.
    ///
    /// # Errors
    /// As [`Gguf::opt_u32`].
    pub fn opt_f32(&self, key: &str) -> Result<Option<f32>> {
        self.get(key).map(|value| self.to_f32(key, value)).transpose()
    }

    /// A boolean.
    ///
    /// # Errors
    /// As [`Gguf::u32`].
    pub fn bool(&self, key: &str) -> Result<bool> {
        self.required(key, self.opt_bool(key)?)
    }

    /// As [`Gguf::bool`], `None` if the key is missing.
    ///
    /// # Errors
    /// As [`Gguf::opt_u32`].
    pub fn opt_bool(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(self.wrong_type(key, other, "a boolean")),
        }
    }

    /// A string, which must be UTF-8.
    ///
    /// # Errors
    /// As [`Gguf::u32`].
    pub fn str(&self, key: &str) -> Result<&str> {
        self.required(key, self.opt_str(key)?)
    }

    /// As [`Gguf::str`], `None` if the key is missing.
    ///
    /// # Errors
    /// As [`Gguf::opt_u32`].
    pub fn opt_str(&self, key: &str) -> Result<Option<&str>> {
        self.get(key).map(|value| self.to_str(key, value, None)).transpose()
    }

    /// An array of any element type.
    ///
    /// # Errors
    /// As [`Gguf::u32`].
    pub fn array(&self, key: &str) -> Result<Array<'_>> {
        match self.required(key, self.get(key))? {
            Value::Array(array) => Ok(array),
            other => Err(self.wrong_type(key, other, "an array")),
        }
    }

    /// An array of strings, each of which must be UTF-8. Borrows the file; only the list is allocated.
    ///
    /// # Errors
    /// As [`Gguf::u32`].
    pub fn strings(&self, key: &str) -> Result<Vec<&str>> {
        let array = self.array(key)?;
        array.iter().enumerate().map(|(i, value)| self.to_str(key, value, Some(i))).collect()
    }

    /// An array of integers that must fit u32.
    ///
    /// # Errors
    /// As [`Gguf::u32`].
    pub fn u32s(&self, key: &str) -> Result<Vec<u32>> {
        self.array(key)?.iter().map(|value| self.to_int(key, value, "u32")).collect()
    }

    /// An array of integers that must fit i32.
    ///
    /// # Errors
    /// As [`Gguf::u32`].
    pub fn i32s(&self, key: &str) -> Result<Vec<i32>> {
        self.array(key)?.iter().map(|value| self.to_int(key, value, "i32")).collect()
    }

    /// An array of floats.
    ///
    /// # Errors
    /// As [`Gguf::u32`].
    pub fn f32s(&self, key: &str) -> Result<Vec<f32>> {
        self.array(key)?.iter().map(|value| self.to_f32(key, value)).collect()
    }
}
