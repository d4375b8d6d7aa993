//! JSON as Python's `json.dumps` writes it. Models saw tool definitions in exactly this form, down to
//! the spaces.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

/// Nesting that is refused; Python's own limit is about a thousand.
const MAX_DEPTH: usize = 200;
/// Widest indentation.
const MAX_INDENT: usize = 16;

/// The arguments of `json.dumps`.
#[derive(Debug, Default)]
pub(super) struct Style {
    pub(super) ensure_ascii: bool,
    pub(super) indent: Option<usize>,
    /// Between items, and between a key and its value.
    pub(super) separators: Option<[String; 2]>,
    pub(super) sort_keys: bool,
}

pub(super) fn dumps(value: &Value, style: &Style) -> Result<String, Error> {
    let (item, key) = match (&style.separators, style.indent) {
        (Some([item, key]), _) => (item.as_str(), key.as_str()),
        (None, Some(_)) => (",", ": "),
        (None, None) => (", ", ": "),
    };
    let mut writer = Writer { out: String::new(), style, item, key };
    writer.value(value, 0)?;
    Ok(writer.out)
}

struct Writer<'a> {
    out: String,
    style: &'a Style,
    item: &'a str,
    key: &'a str,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(Error::new(ErrorKind::BadSerialization, "JSON is nested too deeply"));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Map => self.object(value, depth)?,
            ValueKind::Seq | ValueKind::Iterable => self.array(value, depth)?,
            kind => return Err(Error::new(ErrorKind::BadSerialization, format!("{kind} is not JSON serializable"))),
        }
        Ok(())
    }

    fn array(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.out.push('[');
        let mut any = false;
        for item in value.try_iter()?.checked() {
            self.separate(any, depth + 1);
            any = true;
            self.value(&item?, depth + 1)?;
        }
        self.close(any, depth, ']');
        Ok(())
    }

    fn object(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut keys: Vec<Value> = value.try_iter()?.checked().collect::<Result<_, _>>()?;
        if self.style.sort_keys {
            keys.sort();
        }
        self.out.push('{');
        for (i, key) in keys.iter().enumerate() {
            self.separate(i > 0, depth + 1);
            match key.as_str() {
                Some(text) => self.string(text),
                None => {
                    let text = dumps(key, &Style::default())?;
                    self.string(&text);
                }
            }
            self.out.push_str(self.key);
            self.value(&value.get_item(key)?, depth + 1)?;
        }
        self.close(!keys.is_empty(), depth, '}');
        Ok(())
    }

    fn separate(&mut self, after_item: bool, depth: usize) {
        if after_item {
            self.out.push_str(self.item);
        }
        self.new_line(depth);
    }

    fn close(&mut self, any: bool, depth: usize, bracket: char) {
        if any {
            self.new_line(depth);
        }
        self.out.push(bracket);
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = self.style.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent.min(MAX_INDENT) * depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.style.ensure_ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// A number as Python prints it: the shortest digits that read back, as a plain decimal from 1e-4 to
/// below 1e16, and always with a point or an exponent if it is a float.
pub(super) fn number(value: &Value) -> String {
    let float = match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => float,
        _ => return value.to_string(),
    };
    if !float.is_finite() {
        let name = if float.is_nan() { "NaN" } else { "Infinity" };
        return format!("{}{name}", if float < 0.0 { "-" } else { "" });
    }
    let magnitude = float.abs();
    if magnitude == 0.0 || (1e-4..1e16).contains(&magnitude) {
        return format!("{float:?}");
    }
    let scientific = format!("{float:e}");
    match scientific.split_once('e') {
        Some((digits, exponent)) => {
            let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |rest| ('-', rest));
            format!("{digits}e{sign}{exponent:0>2}")
        }
        None => scientific,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_print_as_pythons() {
        let cases = [
            (1.0, "1.0"),
            (0.0025, "0.0025"),
            (1e-5, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1e16, "1e+16"),
            (123456789012345680.0, "1.2345678901234568e+17"),
            (1e15, "1000000000000000.0"),
            (-0.0, "-0.0"),
            (1e100, "1e+100"),
            (0.1, "0.1"),
        ];
        for (float, wanted) in cases {
            assert_eq!(number(&Value::from(float)), wanted);
        }
        assert_eq!(number(&Value::from(7)), "7");
        assert_eq!(number(&Value::from(u64::MAX)), "18446744073709551615");
        assert_eq!(number(&Value::from(f64::NEG_INFINITY)), "-Infinity");
    }
}
