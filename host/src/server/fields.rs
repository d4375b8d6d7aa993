//! The fields of a request, one at a time: `null` is the same as absent, unknown ones are not looked at, and one of the
//! wrong type is an error that names it.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::error::ApiError;

/// A JSON object of a request.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a> {
    /// Where it stands in the request, with a dot, or nothing at the top.
    place: &'static str,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// The whole request.
    pub(super) fn new(map: &'a Map<String, Value>) -> Self {
        Self { place: "", map }
    }

    /// An error about a field of this object.
    pub(super) fn wrong(&self, name: &str, problem: impl std::fmt::Display) -> ApiError {
        ApiError::field(format!("{}{name}", self.place), problem)
    }

    /// A field, of any type but null.
    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    fn typed<T>(
        &self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.wrong(name, format!("expected {expected}, got {}", sketch(value))))
    }

    pub(super) fn bool(&self, name: &str) -> Result<bool, ApiError> {
        Ok(self.typed(name, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.typed(name, "a string", Value::as_str)
    }

    pub(super) fn list(&self, name: &str) -> Result<Option<&'a [Value]>, ApiError> {
        self.typed(name, "a list", |value| value.as_array().map(Vec::as_slice))
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<f32>, ApiError> {
        self.typed(name, "a number", |value| value.as_f64().map(|x| x as f32))
    }

    /// A whole number; 3.0 is one.
    pub(super) fn integer(&self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let Some(n) = self.typed(name, "an integer", whole)? else { return Ok(None) };
        if range.contains(&n) {
            return Ok(Some(n));
        }
        Err(self.wrong(name, format!("{n} is not from {} to {}", range.start(), range.end())))
    }

    /// An object; `place` is its name with a dot.
    pub(super) fn object(&self, name: &str, place: &'static str) -> Result<Option<Fields<'a>>, ApiError> {
        Ok(self.map(name)?.map(|map| Fields { place, map }))
    }

    /// An object with names of the client's choice.
    pub(super) fn map(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        self.typed(name, "an object", Value::as_object)
    }
}

/// The value of a whole number, however it is written.
pub(super) fn whole(value: &Value) -> Option<i64> {
    // Above 2^53 a float does not name one integer.
    let from_float = |x: f64| (x.fract() == 0.0 && x.abs() <= 9_007_199_254_740_992.0).then_some(x as i64);
    value.as_i64().or_else(|| if value.is_f64() { value.as_f64().and_then(from_float) } else { None })
}

/// A value short enough for a message.
pub(super) fn sketch(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::String(_) => "a string".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn null_is_absent_and_a_wrong_type_is_named() {
        let json = json!({"a": null, "b": "x", "c": 3.0, "d": 3.5, "e": 1e300, "f": true});
        let fields = Fields::new(json.as_object().expect("an object"));
        assert_eq!(fields.number("a"), Ok(None));
        assert_eq!(fields.number("missing"), Ok(None));
        assert_eq!(fields.integer("c", 0..=3), Ok(Some(3)));
        for (name, want) in [
            ("b", "b: expected an integer, got a string"),
            ("d", "d: expected an integer, got 3.5"),
            ("e", "e: expected an integer, got 1e+300"),
            ("f", "f: expected an integer, got true"),
        ] {
            let error = fields.integer(name, 0..=9).expect_err(name).to_json();
            assert_eq!((error["error"]["message"].as_str(), &error["error"]["param"]), (Some(want), &json!(name)));
        }
        let error = fields.integer("c", 4..=9).expect_err("out of range").to_json();
        assert_eq!(error["error"]["message"], "c: 3 is not from 4 to 9");
    }
}
