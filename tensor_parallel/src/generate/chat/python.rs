//! Methods, filters and tests as Python and Jinja2 have them, where those of the template engine differ or are missing.

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value, escape_formatter};

use super::LARGEST_PROMPT;
use super::source::{PERCENT, SLICE};
use crate::python_json;

/// Adds what transformers gives to templates.
pub(super) fn add_to(environment: &mut Environment<'_>) {
    environment.set_unknown_method_callback(call_method);
    environment.set_formatter(|out, state, value| match float_text(value) {
        Some(text) => out.write_str(&text).map_err(Error::from),
        None => escape_formatter(out, state, value),
    });
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("cycler", |items: Rest<Value>| minijinja_contrib::globals::cycler(items.0));
    environment.add_function("joiner", minijinja_contrib::globals::joiner);
    environment.add_filter("tojson", to_json);
    environment.add_filter(PERCENT, percent);
    for name in ["e", "escape", "forceescape"] {
        environment.add_filter(name, escape);
    }
    for name in ["length", "count"] {
        environment.add_filter(name, length);
    }
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("string", |value: &Value| match float_text(value) {
        Some(text) => Value::from(text),
        None if value.kind() == ValueKind::String => value.clone(),
        None => Value::from(value.to_string()),
    });
    environment.add_filter("indent", indent);
    environment.add_filter("replace", replace);
    environment.add_filter("truncate", truncate);
    environment.add_filter("wordcount", |text: &str| {
        text.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty()).count()
    });
    environment.add_filter("trim", |text: &str, characters: Option<&str>| {
        strip(text, characters, true, true).to_owned()
    });
    environment.add_test("sequence", is_sequence);
    environment.add_test("callable", is_callable);
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
}

pub(super) fn invalid(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, text.into())
}

/// Returns an error with this text. Templates call this function to reject messages.
fn raise_exception(text: &str) -> Result<Value, Error> {
    Err(invalid(text))
}

/// Formats a text with the right operand of `%`: a tuple of values, a mapping or one value.
fn percent(text: &str, values: Value) -> Result<String, Error> {
    let values = if values.is_tuple() { values.try_iter()?.collect() } else { vec![values] };
    format(FormatStyle::Printf, text, &values)
}

/// Returns true for what has a length and items in Python, which includes texts and mappings.
#[expect(clippy::needless_pass_by_value, reason = "the engine passes values so")]
fn is_sequence(value: Value) -> bool {
    match value.kind() {
        ValueKind::Undefined | ValueKind::String | ValueKind::Bytes | ValueKind::Seq | ValueKind::Map => true,
        // The sum of two lists, for example.
        ValueKind::Iterable => value.len().is_some(),
        _ => false,
    }
}

/// Returns true for what has a call in Python, which includes what is undefined.
#[expect(clippy::needless_pass_by_value, reason = "the engine passes values so")]
fn is_callable(value: Value) -> bool {
    // Macros and loops are mappings for the engine, and a cycler is a plain object as functions are.
    let is_a = |name: &str| value.as_object().is_some_and(|object| object.type_name().ends_with(name));
    match value.kind() {
        ValueKind::Undefined => true,
        ValueKind::Plain => !is_a("::Cycler"),
        _ => is_a("::Macro") || is_a("::Loop"),
    }
}

/// Returns the arguments with these names, which may also be given by position. `none` counts as missing.
fn arguments<const N: usize>(
    names: [&'static str; N],
    positional: Vec<Value>,
    named: &Kwargs,
) -> Result<[Option<Value>; N], Error> {
    if positional.len() > N {
        return Err(ErrorKind::TooManyArguments.into());
    }
    let mut positional = positional.into_iter();
    let mut found = [const { None }; N];
    for (name, found) in names.iter().zip(&mut found) {
        let value = positional.next().map_or_else(|| named.get(name), |value| Ok(Some(value)))?;
        *found = value.filter(|value: &Value| !value.is_none());
    }
    named.assert_all_used()?;
    Ok(found)
}

fn number(value: Option<Value>, default: usize) -> Result<usize, Error> {
    value.map_or(Ok(default), |value| Ok(usize::try_from(i64::try_from(value)?).unwrap_or(0)))
}

fn is_set(value: Option<Value>) -> bool {
    value.is_some_and(|value| value.is_true())
}

/// Returns the indent that a text or a number of spaces stands for.
fn indent_text(indent: Value) -> Result<String, Error> {
    match indent.as_str() {
        Some(text) => Ok(text.to_owned()),
        None => Ok(" ".repeat(number(Some(indent), 0)?)),
    }
}

/// Serializes to JSON with the options of transformers' `tojson`.
#[expect(clippy::needless_pass_by_value, reason = "the engine passes values so")]
fn to_json(value: Value, Rest(positional): Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let [ensure_ascii, indent, separators, sort_keys] =
        arguments(["ensure_ascii", "indent", "separators", "sort_keys"], positional, &named)?;
    let indent = indent.map(indent_text).transpose()?;
    let separators = match separators {
        None => (if indent.is_some() { "," } else { ", " }.into(), ": ".into()),
        Some(separators) => match separators.try_iter()?.collect::<Vec<_>>().as_slice() {
            [item, key] if item.as_str().and(key.as_str()).is_some() => (item.to_string(), key.to_string()),
            _ => return Err(invalid("`separators` of tojson must be two texts")),
        },
    };
    let style = python_json::Style { indent, separators, ensure_ascii: is_set(ensure_ascii) };
    let text = if is_set(sort_keys) {
        serde_json::to_value(&value).and_then(|mut value| {
            value.sort_all_objects();
            python_json::text(&value, style)
        })
    } else {
        python_json::text(&value, style)
    };
    let text = text.map_err(|error| invalid("the value is not JSON").with_source(error))?;
    Ok(Value::from_safe_string(text))
}

/// Escapes text for HTML with the entities that Python uses.
#[expect(clippy::needless_pass_by_value, reason = "the engine passes values so")]
fn escape(value: Value) -> Value {
    let mut escaped = String::new();
    for c in value.to_string().chars() {
        match c {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '\'' => escaped += "&#39;",
            '"' => escaped += "&#34;",
            _ => escaped.push(c),
        }
    }
    Value::from_safe_string(escaped)
}

#[expect(clippy::needless_pass_by_value, reason = "the engine passes values so")]
fn length(value: Value) -> Result<usize, Error> {
    let length = if value.is_undefined() { Some(0) } else { value.len() };
    length.ok_or_else(|| invalid(format!("a value of type {} has no length", value.kind())))
}

/// Returns a whole number, or the default for what is none.
#[expect(clippy::needless_pass_by_value, reason = "the engine passes values so")]
fn int(value: Value, Rest(positional): Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let [default, base] = arguments(["default", "base"], positional, &named)?;
    let base = u32::try_from(number(base, 10)?).ok().filter(|base| (2..=36).contains(base));
    let base = base.ok_or_else(|| invalid("`base` of int must be from 2 to 36"))?;
    let whole = match value.as_str().map(str::trim) {
        Some(text) => {
            let prefix = [(2, "0b"), (8, "0o"), (16, "0x")].into_iter().find(|(radix, _)| *radix == base);
            let digits = prefix.and_then(|(_, prefix)| text.strip_prefix(prefix)).unwrap_or(text);
            let whole = i128::from_str_radix(digits, base).ok();
            whole.or_else(|| {
                text.parse().ok().filter(|number: &f64| number.is_finite()).map(|number| number as i128)
            })
        }
        None => i128::try_from(value.clone()).ok().or_else(|| Some(f64::try_from(value).ok()? as i128)),
    };
    Ok(whole.map_or_else(
        || default.unwrap_or_else(|| 0.into()),
        |whole| i64::try_from(whole).map_or_else(|_| whole.into(), Value::from),
    ))
}

/// Returns a number with a fraction, or the default for what is none.
#[expect(clippy::needless_pass_by_value, reason = "the engine passes values so")]
fn float(value: Value, Rest(positional): Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let [default] = arguments(["default"], positional, &named)?;
    let number = match value.as_str() {
        Some(text) => text.trim().parse().ok(),
        None => f64::try_from(value).ok(),
    };
    Ok(number.map_or_else(|| default.unwrap_or_else(|| 0.0.into()), Value::from))
}

/// Returns the text of a number with a fraction. Returns `None` for other values.
fn float_text(value: &Value) -> Option<String> {
    if !value.is_number() || value.is_integer() {
        return None;
    }
    f64::try_from(value.clone()).ok().map(python_json::float)
}

/// Indents the lines after the first.
#[expect(clippy::needless_pass_by_value, reason = "the engine passes values so")]
fn indent(text: &str, Rest(positional): Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let [width, first, blank] = arguments(["width", "first", "blank"], positional, &named)?;
    let (indent, blank) = (width.map_or_else(|| Ok("    ".into()), indent_text)?, is_set(blank));
    let mut out = if is_set(first) { indent.clone() } else { String::new() };
    let text = format!("{text}\n");
    for (at, line) in lines(&text, false).into_iter().enumerate() {
        if at > 0 {
            out.push('\n');
            out += if blank || !line.is_empty() { &indent } else { "" };
        }
        out += line;
    }
    Ok(out)
}

#[expect(clippy::needless_pass_by_value, reason = "the engine passes values so")]
fn replace(value: Value, old: &str, new: Value, count: Option<i64>) -> String {
    let (text, new) = (value.to_string(), new.to_string());
    match count.and_then(|count| usize::try_from(count).ok()) {
        Some(count) => text.replacen(old, &new, count),
        None => text.replace(old, &new),
    }
}

/// Shortens a text that is longer than `length` and some leeway, at a space unless `killwords`.
#[expect(clippy::needless_pass_by_value, reason = "the engine passes values so")]
fn truncate(text: &str, Rest(positional): Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let [length, killwords, end, leeway] =
        arguments(["length", "killwords", "end", "leeway"], positional, &named)?;
    let (length, leeway) = (number(length, 255)?, number(leeway, 5)?);
    let end = end.map_or_else(|| "...".into(), |end| end.to_string());
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text.into());
    }
    let Some(kept) = length.checked_sub(end.chars().count()) else {
        return Err(invalid("`length` of truncate is less than the length of `end`"));
    };
    let kept: String = text.chars().take(kept).collect();
    let kept = if is_set(killwords) { &kept } else { kept.rsplit_once(' ').map_or(&*kept, |(kept, _)| kept) };
    Ok(format!("{kept}{end}"))
}

/// Calls a method of Python's texts, lists and dictionaries.
fn call_method(state: &mut State<'_, '_>, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let own = match (value.kind(), value.as_str()) {
        _ if name == SLICE => Some(slice_with_step(value, args)?),
        (_, Some(text)) => text_method(text, name, args)?,
        (ValueKind::Seq | ValueKind::Iterable, _) if name == "index" => {
            let (wanted,): (&Value,) = from_args(args)?;
            let at = value.try_iter()?.position(|item| item == *wanted);
            Some(at.map(Value::from).ok_or_else(|| invalid(format!("{wanted} is not in the list")))?)
        }
        (ValueKind::Seq | ValueKind::Map, _) if name == "copy" => {
            let () = from_args(args)?;
            Some(value.clone())
        }
        _ => None,
    };
    match own {
        Some(result) => Ok(result),
        None => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// Calls a method of Python's texts. Returns `None` for those that the compatibility layer of the engine has right.
fn text_method(text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match name {
        "strip" | "lstrip" | "rstrip" => {
            let (characters,): (Option<&str>,) = from_args(args)?;
            strip(text, characters, name != "rstrip", name != "lstrip").into()
        }
        "isspace" => {
            let () = from_args(args)?;
            (!text.is_empty() && text.chars().all(is_space)).into()
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            text.strip_prefix(prefix).unwrap_or(text).into()
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            text.strip_suffix(suffix).unwrap_or(text).into()
        }
        "split" | "rsplit" => {
            let (Rest(positional), named): (Rest<Value>, Kwargs) = from_args(args)?;
            let [separator, limit] = arguments(["sep", "maxsplit"], positional, &named)?;
            // A negative limit is none.
            let limit = limit.map(i64::try_from).transpose()?.and_then(|limit| usize::try_from(limit).ok());
            let parts: Vec<&str> = match (separator.as_ref().map(Value::as_str), name) {
                (Some(None), _) => return Err(invalid("the separator must be a text")),
                (Some(Some("")), _) => return Err(invalid("the separator is empty")),
                (Some(Some(separator)), "split") => match limit {
                    None => text.split(separator).collect(),
                    Some(limit) => text.splitn(limit.saturating_add(1), separator).collect(),
                },
                (Some(Some(separator)), _) => {
                    let most = limit.map_or(usize::MAX, |limit| limit.saturating_add(1));
                    let mut parts: Vec<&str> = text.rsplitn(most, separator).collect();
                    parts.reverse();
                    parts
                }
                (None, "split") => words(text, limit),
                (None, _) => words_from_end(text, limit),
            };
            parts.into_iter().map(Value::from).collect()
        }
        "splitlines" => {
            let (Rest(positional), named): (Rest<Value>, Kwargs) = from_args(args)?;
            let [keep] = arguments(["keepends"], positional, &named)?;
            lines(text, is_set(keep)).into_iter().map(Value::from).collect()
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            if separator.is_empty() {
                return Err(invalid("the separator is empty"));
            }
            let parts = match (name, text.split_once(separator), text.rsplit_once(separator)) {
                ("partition", Some((before, after)), _) | ("rpartition", _, Some((before, after))) => {
                    [before, separator, after]
                }
                ("partition", ..) => [text, "", ""],
                _ => ["", "", text],
            };
            Tuple::from(parts.map(Value::from)).into()
        }
        "title" => {
            let () = from_args(args)?;
            title(text).into()
        }
        "zfill" => {
            let (width,): (i64,) = from_args(args)?;
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
            let digits = pad(digits, name, width.saturating_sub(sign.len() as i64), "0")?;
            format!("{sign}{digits}").into()
        }
        "ljust" | "rjust" | "center" => {
            let (width, fill): (i64, Option<&str>) = from_args(args)?;
            pad(text, name, width, fill.unwrap_or(" "))?.into()
        }
        "find" | "rfind" | "index" | "rindex" | "count" => {
            let (wanted, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
            let (from, part) = slice(text, start, end);
            if name == "count" {
                let count =
                    if wanted.is_empty() { part.chars().count() + 1 } else { part.matches(wanted).count() };
                return Ok(Some(count.into()));
            }
            let at = if name.starts_with('r') { part.rfind(wanted) } else { part.find(wanted) };
            match at {
                Some(at) => (from + part[..at].chars().count()).into(),
                None if name.ends_with("index") => return Err(invalid("substring not found")),
                None => (-1).into(),
            }
        }
        _ => return Ok(None),
    }))
}

/// Returns the part `[start:stop:step]` of a text or a list.
fn slice_with_step(value: &Value, args: &[Value]) -> Result<Value, Error> {
    let (start, stop, step): (Option<i64>, Option<i64>, Option<i64>) = from_args(args)?;
    if !matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Iterable) {
        return Err(invalid(format!("a value of type {} cannot be sliced", value.kind())));
    }
    let step = step.unwrap_or(1);
    if step == 0 {
        return Err(invalid("the step of a slice is 0"));
    }
    let items: Vec<Value> = value.try_iter()?.collect();
    let length = items.len() as i64;
    // A negative step goes from the last item to the position before the first.
    let (first, end) = if step < 0 { (length - 1, -1) } else { (0, length) };
    let position = |at: i64| {
        let at = if at < 0 { length.saturating_add(at) } else { at };
        at.clamp(first.min(end), first.max(end))
    };
    let (start, stop) = (start.map_or(first, position), stop.map_or(end, position));
    let is_before = |at: &i64| if step < 0 { *at > stop } else { *at < stop };
    let positions = std::iter::successors(Some(start), |at| at.checked_add(step)).take_while(is_before);
    let part = positions.map(|at| items[at as usize].clone());
    Ok(if value.as_str().is_some() {
        part.map(|character| character.to_string()).collect::<String>().into()
    } else if value.is_tuple() {
        Tuple::from(part.collect::<Vec<_>>()).into()
    } else {
        part.collect()
    })
}

/// Returns the part between two positions, which count from the end if negative, and its position.
fn slice(text: &str, start: Option<i64>, end: Option<i64>) -> (usize, &str) {
    let length = text.chars().count() as i64;
    let position = |at: i64| (if at < 0 { length.saturating_add(at) } else { at }).clamp(0, length) as usize;
    let (start, end) = (position(start.unwrap_or(0)), position(end.unwrap_or(length)));
    let byte = |at: usize| text.char_indices().nth(at).map_or(text.len(), |(byte, _)| byte);
    (start, text.get(byte(start)..byte(end)).unwrap_or_default())
}

/// Python also counts four control characters as spaces.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

fn strip<'a>(text: &'a str, characters: Option<&str>, start: bool, end: bool) -> &'a str {
    let is_stripped = |c: char| characters.map_or_else(|| is_space(c), |characters| characters.contains(c));
    let text = if start { text.trim_start_matches(is_stripped) } else { text };
    if end { text.trim_end_matches(is_stripped) } else { text }
}

/// Splits at spaces, at most `limit` times from the start. The last part keeps its spaces.
fn words(text: &str, limit: Option<usize>) -> Vec<&str> {
    let (mut parts, mut rest) = (Vec::new(), text.trim_start_matches(is_space));
    while !rest.is_empty() {
        let end = if limit.is_some_and(|limit| parts.len() >= limit) { None } else { rest.find(is_space) };
        let (word, after) = rest.split_at(end.unwrap_or(rest.len()));
        parts.push(word);
        rest = after.trim_start_matches(is_space);
    }
    parts
}

/// Splits at spaces, at most `limit` times from the end. The first part keeps its spaces.
fn words_from_end(text: &str, limit: Option<usize>) -> Vec<&str> {
    let (mut parts, mut rest) = (Vec::new(), text.trim_end_matches(is_space));
    while !rest.is_empty() {
        let space = if limit.is_some_and(|limit| parts.len() >= limit) { None } else { rest.rfind(is_space) };
        let start = space.map_or(0, |at| at + rest[at..].chars().next().map_or(0, char::len_utf8));
        let (before, word) = rest.split_at(start);
        parts.push(word);
        rest = before.trim_end_matches(is_space);
    }
    parts.reverse();
    parts
}

/// Splits at the line breaks that Python knows.
fn lines(text: &str, keep: bool) -> Vec<&str> {
    let is_break = |c: char| matches!(c, '\n'..='\r' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let (mut lines, mut rest) = (Vec::new(), text);
    while !rest.is_empty() {
        let end = rest.find(is_break).unwrap_or(rest.len());
        let length = if rest[end..].starts_with("\r\n") {
            2
        } else {
            rest[end..].chars().next().map_or(0, char::len_utf8)
        };
        lines.push(&rest[..if keep { end + length } else { end }]);
        rest = &rest[end + length..];
    }
    lines
}

/// Fills a text up to a width, at the side that the method with this name fills.
fn pad(text: &str, name: &str, width: i64, fill: &str) -> Result<String, Error> {
    if fill.chars().count() != 1 {
        return Err(invalid("The fill character must be exactly one character long"));
    }
    let width = usize::try_from(width).unwrap_or(0);
    if width as u64 > LARGEST_PROMPT.get() {
        return Err(invalid(format!("the width {width} is larger than a prompt may be, {LARGEST_PROMPT}")));
    }
    let missing = width.saturating_sub(text.chars().count());
    let before = match name {
        "ljust" => 0,
        // Python puts an odd space before the text if the width is odd.
        "center" => missing / 2 + (missing & width & 1),
        _ => missing,
    };
    Ok(format!("{}{text}{}", fill.repeat(before), fill.repeat(missing - before)))
}

fn lower(c: char) -> String {
    c.to_lowercase().collect()
}

/// Begins every run of letters with a capital letter.
fn title(text: &str) -> String {
    let mut is_inside = false;
    let cased = |c: char| {
        let cased = if is_inside { lower(c) } else { c.to_uppercase().collect() };
        is_inside = c.is_alphabetic();
        cased
    };
    text.chars().map(cased).collect()
}
