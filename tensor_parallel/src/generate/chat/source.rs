//! The source of a chat template, from what Jinja2 accepts to what the template engine accepts.

use std::collections::BTreeSet;

/// Maximum number of tokens between two delimiters. Long expressions nest as deep as they are long, and parsers recurse.
const LONGEST_TAG: usize = 4096;
/// Maximum number of `elif`, each of which nests in the one before.
const MOST_BRANCHES: usize = 1024;

/// The filter that stands for the operator `%` of texts.
pub(super) const PERCENT: &str = "python_percent";
/// The method that stands for a slice with a step.
pub(super) const SLICE: &str = "python_slice";
/// Words between names in an expression.
const OPERATORS: [&str; 7] = ["and", "else", "if", "in", "is", "not", "or"];

/// Rewrites what the engine reads differently from Jinja2 with the extensions of transformers:
///
/// - every line break is `\n`;
/// - in a string literal, a backslash before a line break removes both, and some escapes are only Python's;
/// - `{% generation %}`, which marks text for training, is a scope;
/// - `%` formats a string literal;
/// - a slice with a step is a method call;
/// - a macro or a call block begins with a statement that names its variables, because the engine does not find all of them.
///
/// # Errors
/// Returns the limit that a template exceeds.
pub(super) fn rewrite(source: &str) -> Result<String, String> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let (mut out, mut rest, mut branches) = (String::with_capacity(source.len()), source.as_str(), 0);
    let mut bodies = Bodies::default();
    while let Some(start) = find_delimiter(rest) {
        let (text, tag) = rest.split_at(start);
        out += text;
        rest = match tag.as_bytes()[1] {
            b'#' => {
                let (comment, after) = tag.split_at(tag.find("#}").map_or(tag.len(), |end| end + 2));
                out += comment;
                after
            }
            b'%' if basic_tag(tag, "raw").is_some() => {
                let end = tag
                    .match_indices("{%")
                    .find_map(|(at, _)| basic_tag(&tag[at..], "endraw").map(|length| at + length));
                let (raw, after) = tag.split_at(end.unwrap_or(tag.len()));
                out += raw;
                after
            }
            kind => {
                let (tokens, after) = lex(tag, kind == b'%');
                if tokens.iter().filter(|token| token.kind != Kind::Space).count() > LONGEST_TAG {
                    return Err(format!("one of its tags has more than {LONGEST_TAG} tokens"));
                }
                let name = tokens.iter().position(|token| token.kind == Kind::Name).filter(|_| kind == b'%');
                branches += usize::from(name.is_some_and(|at| tokens[at].text == "elif"));
                if branches > MOST_BRANCHES {
                    return Err(format!("it has more than {MOST_BRANCHES} `elif` branches"));
                }
                write_tag(&mut out, &tokens, name);
                bodies.add(&tokens, name, out.len());
                after
            }
        };
    }
    out += rest;
    Ok(bodies.write(&out))
}

/// The bodies of macros and call blocks.
#[derive(Default)]
struct Bodies<'a> {
    all: Vec<Body<'a>>,
    /// Indices of those that have not ended.
    open: Vec<usize>,
}

struct Body<'a> {
    /// The position after the tag that begins it.
    start: usize,
    /// The delimiter that ends this tag, which decides on the space after it.
    delimiter: &'a str,
    /// What may be a variable in this tag and in the body, without the bodies within.
    names: BTreeSet<&'a str>,
}

impl<'a> Bodies<'a> {
    /// Adds a tag that ends at `end` of the output; `name` is the index of its first name if it is a block.
    fn add(&mut self, tokens: &[Token<'a>], name: Option<usize>, end: usize) {
        let names = tokens.iter().enumerate().filter(|(at, token)| {
            token.kind == Kind::Name && Some(*at) != name && !OPERATORS.contains(&token.text)
        });
        let names = names.map(|(_, token)| token.text);
        if let Some(body) = self.open.last() {
            self.all[*body].names.extend(names.clone());
        }
        match (name.map(|at| tokens[at].text), tokens.last().copied()) {
            (Some("macro" | "call"), Some(Token { kind: Kind::Delimiter, text })) => {
                self.open.push(self.all.len());
                self.all.push(Body { start: end, delimiter: text, names: names.collect() });
            }
            (Some("endmacro" | "endcall"), _) => {
                self.open.pop();
            }
            _ => {}
        }
    }

    /// Returns the output with a statement at the beginning of each body that names the variables, and is never executed.
    fn write(self, out: &str) -> String {
        let (mut written, mut from) = (String::with_capacity(out.len()), 0);
        for Body { start, delimiter, names } in self.all {
            let names = names.into_iter().collect::<Vec<_>>().join(", ");
            written += &out[from..start];
            written.extend(["{% if false %}{{ [", &names, "] }}{% endif ", delimiter]);
            from = start;
        }
        written + &out[from..]
    }
}

/// Returns the position of the first delimiter that opens a tag or a comment.
fn find_delimiter(text: &str) -> Option<usize> {
    text.match_indices('{')
        .map(|(at, _)| at)
        .find(|at| matches!(text.as_bytes().get(at + 1), Some(b'{' | b'%' | b'#')))
}

/// Returns the length of the tag `{% name %}` at the beginning of a text.
fn basic_tag(text: &str, name: &str) -> Option<usize> {
    let inner = text.strip_prefix("{%")?;
    let inner = inner.strip_prefix(['-', '+']).unwrap_or(inner);
    let after = inner.trim_start().strip_prefix(name)?.trim_start();
    let after = after.strip_prefix(['-', '+']).unwrap_or(after).strip_prefix("%}")?;
    Some(text.len() - after.len())
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Delimiter,
    Space,
    Name,
    Number,
    Text,
    /// One character of an operator or a bracket.
    Symbol,
}

#[derive(Clone, Copy, Debug)]
struct Token<'a> {
    kind: Kind,
    text: &'a str,
}

/// Splits a tag into tokens. Also returns the text after it. Brackets hide delimiters that end a tag, as in Jinja2.
fn lex(tag: &str, is_block: bool) -> (Vec<Token<'_>>, &str) {
    let (end, open) = if is_block { ("%}", "{%") } else { ("}}", "{{") };
    let mut tokens = vec![Token { kind: Kind::Delimiter, text: open }];
    let (mut rest, mut depth) = (&tag[open.len()..], 0_usize);
    if let Some(sign) = rest.get(..1).filter(|sign| matches!(*sign, "-" | "+")) {
        tokens.push(Token { kind: Kind::Delimiter, text: sign });
        rest = &rest[1..];
    }
    while let Some(first) = rest.chars().next() {
        let closing = rest.strip_prefix(['-', '+']).unwrap_or(rest);
        if depth == 0 && closing.starts_with(end) {
            let (text, after) = rest.split_at(rest.len() - closing.len() + end.len());
            tokens.push(Token { kind: Kind::Delimiter, text });
            return (tokens, after);
        }
        let up_to = |is_other: &dyn Fn(char) -> bool| rest.find(is_other).unwrap_or(rest.len());
        let (kind, length) = match first {
            '"' | '\'' => (Kind::Text, text_length(rest, first)),
            _ if first.is_whitespace() => (Kind::Space, up_to(&|c| !c.is_whitespace())),
            '0'..='9' => (Kind::Number, up_to(&|c| !(c.is_alphanumeric() || c == '_'))),
            _ if first.is_alphabetic() || first == '_' => {
                (Kind::Name, up_to(&|c| !(c.is_alphanumeric() || c == '_')))
            }
            _ => (Kind::Symbol, first.len_utf8()),
        };
        match first {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        let (text, after) = rest.split_at(length);
        tokens.push(Token { kind, text });
        rest = after;
    }
    (tokens, rest)
}

/// Returns the length of a string literal with its quotation marks.
fn text_length(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if c == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Writes a tag; `name` is the index of its first name if it is a block.
fn write_tag(out: &mut String, tokens: &[Token<'_>], name: Option<usize>) {
    // Number of operands of `%` that end before each token.
    let mut ends = vec![0_usize; tokens.len() + 1];
    let in_slice = slices(tokens);
    for (at, token) in tokens.iter().enumerate() {
        (0..ends[at]).for_each(|_| out.push(')'));
        match (token.kind, token.text) {
            (Kind::Name, "generation") if name == Some(at) => *out += "with",
            (Kind::Name, "endgeneration") if name == Some(at) => *out += "endwith",
            (Kind::Text, text) => write_text(out, text),
            (Kind::Symbol, "%") if is_operator(tokens, at) && is_after_text(&tokens[..at]) => {
                *out += "|";
                *out += PERCENT;
                *out += "(";
                ends[operand_end(tokens, at + 1)] += 1;
            }
            (_, "[") if in_slice[at] => {
                *out += ".";
                *out += SLICE;
                *out += "(";
            }
            (_, ":") if in_slice[at] => *out += ",",
            (_, "]") if in_slice[at] => *out += ")",
            (_, text) => *out += text,
        }
        let mut after = tokens[at + 1..].iter().filter(|token| token.kind != Kind::Space);
        if in_slice[at]
            && token.text != "]"
            && after.next().is_some_and(|next| matches!(next.text, ":" | "]"))
        {
            *out += "none";
        }
    }
    (0..ends[tokens.len()]).for_each(|_| out.push(')'));
}

/// Returns true for the brackets and colons of slices with a step.
fn slices(tokens: &[Token<'_>]) -> Vec<bool> {
    let (mut in_slice, mut open) = (vec![false; tokens.len()], Vec::<Vec<usize>>::new());
    for (at, token) in tokens.iter().enumerate().filter(|(_, token)| token.kind == Kind::Symbol) {
        match token.text {
            "(" | "[" | "{" => open.push(vec![at]),
            ":" => {
                if let Some(group) = open.last_mut() {
                    group.push(at);
                }
            }
            ")" | "]" | "}" => {
                let group = open.pop().unwrap_or_default();
                if token.text == "]" && group.len() == 3 {
                    group.into_iter().chain([at]).for_each(|at| in_slice[at] = true);
                }
            }
            _ => {}
        }
    }
    in_slice
}

/// Returns false for the half of a delimiter that is not closed.
fn is_operator(tokens: &[Token<'_>], at: usize) -> bool {
    tokens.get(at + 1).is_some_and(|next| next.text != "}" && next.kind != Kind::Delimiter)
}

fn is_after_text(before: &[Token<'_>]) -> bool {
    let mut before = before.iter().rev().filter(|token| token.kind != Kind::Space);
    let (mut last, mut is_text) = (before.next(), false);
    while last.is_some_and(|token| token.kind == Kind::Text) {
        (last, is_text) = (before.next(), true);
    }
    // A factor before the text would be multiplied first.
    is_text && last.is_none_or(|token| !matches!(token.text, "*" | "/" | "%"))
}

/// Returns the index after the operand that begins at `at`: signs, a primary expression, and what follows it directly.
fn operand_end(tokens: &[Token<'_>], mut at: usize) -> usize {
    let kind = |at: usize| tokens.get(at).map(|token| (token.kind, token.text));
    let next = |mut at: usize| {
        while let Some((Kind::Space, _)) = kind(at) {
            at += 1;
        }
        at
    };
    at = next(at);
    while let Some((Kind::Symbol, "-" | "+")) = kind(at) {
        at = next(at + 1);
    }
    at = match kind(at) {
        Some((Kind::Symbol, "(" | "[" | "{")) => group_end(tokens, at),
        Some((Kind::Delimiter, _)) | None => return at,
        Some((Kind::Text, _)) => {
            let mut end = at + 1;
            while let Some((Kind::Text, _)) = kind(next(end)) {
                end = next(end) + 1;
            }
            end
        }
        Some(_) => at + 1,
    };
    loop {
        let follower = next(at);
        at = match kind(follower) {
            Some((Kind::Symbol, "(" | "[")) => group_end(tokens, follower),
            Some((Kind::Symbol, "." | "|")) => next(follower + 1) + 1,
            _ => return at.min(tokens.len()),
        };
    }
}

/// Returns the index after the bracket that closes the one at `at`.
fn group_end(tokens: &[Token<'_>], at: usize) -> usize {
    let mut depth = 0_usize;
    for (index, token) in tokens.iter().enumerate().skip(at) {
        match (token.kind, token.text) {
            (Kind::Symbol, "(" | "[" | "{") => depth += 1,
            (Kind::Symbol, ")" | "]" | "}") => depth -= 1,
            (Kind::Delimiter, _) => return index,
            _ => {}
        }
        if depth == 0 {
            return index + 1;
        }
    }
    tokens.len()
}

/// Writes a string literal, with those escapes of Python that the engine reads differently replaced by their meaning.
fn write_text(out: &mut String, text: &str) {
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        *out += &rest[..at];
        let escape = &rest[at..];
        let (meaning, length) = match escape.as_bytes().get(1) {
            Some(b'\n') => (Some(String::new()), 2),
            Some(b'a') => (Some("\\x07".into()), 2),
            Some(b'v') => (Some("\\x0b".into()), 2),
            Some(b'/') => (Some("\\\\/".into()), 2),
            Some(b'U') => {
                let code = escape.get(2..10).and_then(|digits| u32::from_str_radix(digits, 16).ok());
                let character = code.and_then(char::from_u32);
                (
                    character
                        .map(|c| if matches!(c, '"' | '\'' | '\\') { format!("\\{c}") } else { c.into() }),
                    10,
                )
            }
            _ => (None, 2),
        };
        let length =
            if meaning.is_some() { length } else { 1 + escape[1..].chars().next().map_or(0, char::len_utf8) };
        *out += meaning.as_deref().unwrap_or(&escape[..length]);
        rest = &escape[length..];
    }
    *out += rest;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[track_caller]
    fn rewritten(source: &str, expected: &str) {
        assert_eq!(rewrite(source).unwrap(), expected, "{source}");
    }

    #[test]
    fn only_strings_and_marks_within_tags_change() {
        rewritten("a\r\nb\rc{# {% generation %}\\\n #}", "a\nb\nc{# {% generation %}\\\n #}");
        rewritten(
            "{%- raw -%}{% generation %}{% endraw +%}\\a",
            "{%- raw -%}{% generation %}{% endraw +%}\\a",
        );
        rewritten("{%- generation -%}x{%+ endgeneration%}", "{%- with -%}x{%+ endwith%}");
        rewritten("{{ generation }}{% set generation = 1 %}", "{{ generation }}{% set generation = 1 %}");
        rewritten("{{ 'a\\\nb\\/\\a\\v\\U0001F642\\n\\'' }}", "{{ 'ab\\\\/\\x07\\x0b🙂\\n\\'' }}");
        rewritten("{{ {'a': '}}'}['a'] }} {{", "{{ {'a': '}}'}['a'] }} {{");
        rewritten("{{ 'never ended }} {% x", "{{ 'never ended }} {% x");
        rewritten("{{ '\\U0000005c\\U00000027\\U00110000' }}", "{{ '\\\\\\'\\U00110000' }}");
    }

    #[test]
    fn percent_formats_a_literal_and_divides_otherwise() {
        rewritten("{{ '%s' % x }}", "{{ '%s' |python_percent( x) }}");
        rewritten(
            "{{ '%d%%' % -a.b[0](1)|f(2) ~ 'x' }}",
            "{{ '%d%%' |python_percent( -a.b[0](1)|f(2)) ~ 'x' }}",
        );
        rewritten("{%set a='%s' 'b'%('x','y')%}", "{%set a='%s' 'b'|python_percent(('x','y'))%}");
        rewritten("{{ '%s' % '%s' % 1 }}", "{{ '%s' |python_percent( '%s') % 1 }}");
        rewritten("{{ 7 % 2 * '%s' % 1 }}{% if x %}", "{{ 7 % 2 * '%s' % 1 }}{% if x %}");
    }

    #[test]
    fn a_slice_with_a_step_is_a_method_call() {
        rewritten(
            "{{ a[::-1].b[ 1 : n-1 : 2 ] }}",
            "{{ a.python_slice(none,none,-1).b.python_slice( 1 , n-1 , 2 ) }}",
        );
        rewritten("{{ a[b[::2]:: ][0] }}", "{{ a.python_slice(b.python_slice(none,none,2),none,none )[0] }}");
        rewritten(
            "{{ '%s' % a[:0:-1] ~ ':' }}",
            "{{ '%s' |python_percent( a.python_slice(none,0,-1)) ~ ':' }}",
        );
        rewritten(
            "{{ a[1:] }}{{ {'a': [1, ':::'], 'b': 2}[':'] }}::",
            "{{ a[1:] }}{{ {'a': [1, ':::'], 'b': 2}[':'] }}::",
        );
    }

    #[test]
    fn bodies_of_macros_begin_with_the_names_in_them() {
        rewritten(
            "{%- macro m(x=1) -%}\n{{ a.b[1:] if not 'c' }}{% call(d) n() %}{% set e = e %}{% endcall %}{{ f }}{% endmacro %}{{ g }}",
            "{%- macro m(x=1) -%}{% if false %}{{ [a, b, d, f, m, n, x] }}{% endif -%}\n{{ a.b[1:] if not 'c' }}\
             {% call(d) n() %}{% if false %}{{ [d, e, n] }}{% endif %}{% set e = e %}{% endcall %}{{ f }}{% endmacro %}{{ g }}",
        );
        rewritten(
            "{% raw %}{% macro m() %}{{ a }}{% endraw %}{% macro",
            "{% raw %}{% macro m() %}{{ a }}{% endraw %}{% macro",
        );
    }

    #[test]
    fn long_tags_and_branches_are_refused() {
        let refused = |source: String| rewrite(&source).unwrap_err();
        assert!(refused(format!("{{{{ {}1 }}}}", "not ".repeat(5000))).contains("more than 4096 tokens"));
        assert!(refused("{% elif x %}".repeat(2000)).contains("more than 1024 `elif`"));
    }

    proptest! {
        #[test]
        fn any_text_is_read_to_its_end(source in r#"([{}%#\\'"+()a.|\n-]|raw|endraw|\PC){0,40}"#) {
            let _ = rewrite(&source);
        }

        #[test]
        fn templates_without_differences_stay(source in r#"(\{%|%\}|\{\{|\}\}|[a-z "().]|\n|if|raw){0,40}"#) {
            prop_assert_eq!(rewrite(&source).unwrap(), source);
        }
    }
}
