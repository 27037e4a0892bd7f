use serde_json::{Map, json};

use super::*;
use crate::testing::fixture;

/// The output of `tests/fixtures/chat/make.py`.
#[derive(Deserialize)]
struct Expected {
    now: ChatTime,
    bos_token: String,
    eos_token: String,
    cases: Vec<Case>,
    families: Families,
    expressions: Expressions,
}

#[derive(Deserialize)]
struct Case {
    template: String,
    messages: Vec<Message>,
    #[serde(flatten)]
    outcome: Outcome,
}

/// The result of transformers for a template.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Outcome {
    Prompt(String),
    /// The words with which the template refuses the messages.
    Refused(String),
}

#[derive(Deserialize)]
struct Families {
    special_tokens: Map<String, serde_json::Value>,
    chats: Vec<Chat>,
    templates: BTreeMap<String, String>,
    prompts: BTreeMap<String, Vec<Outcome>>,
}

#[derive(Deserialize)]
struct Chat {
    messages: Value,
    #[serde(default)]
    tools: Value,
}

#[derive(Deserialize)]
struct Expressions {
    given: String,
    values: Vec<(String, Outcome)>,
}

/// Returns what is different.
fn difference(name: &str, got: Result<String, ChatError>, expected: &Outcome) -> Option<String> {
    let is_same = match (&got, expected) {
        (Ok(got), Outcome::Prompt(prompt)) => got == prompt,
        (Err(error), Outcome::Refused(words)) => error.to_string().contains(words),
        _ => false,
    };
    (!is_same).then(|| match got {
        Ok(got) => format!("{name}: {got:?}, with transformers {expected:?}"),
        Err(error) => format!("{name}: {error}, with transformers {expected:?}"),
    })
}

fn expected() -> Expected {
    serde_json::from_slice(&std::fs::read(fixture("chat/expected.json")).unwrap()).unwrap()
}

/// Creates a folder with this `tokenizer_config.json`.
fn folder(config: &serde_json::Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    folder
}

fn open(config: &serde_json::Value) -> Result<ChatTemplate> {
    ChatTemplate::open(folder(config).path())
}

fn rendered(template: &str) -> Result<String, ChatError> {
    let template = open(&json!({ "chat_template": template })).unwrap();
    template.render(&[Message::user("hi")], expected().now)
}

#[test]
fn prompts_are_those_of_transformers() {
    let Expected { now, bos_token, eos_token, cases, .. } = expected();
    assert!(cases.len() >= 30);
    for Case { template: name, messages, outcome } in cases {
        let text = std::fs::read_to_string(fixture("chat").join(&name)).unwrap();
        let template = open(&json!({
            "chat_template": text,
            "bos_token": bos_token,
            "eos_token": { "content": eos_token, "lstrip": false },
        }));
        let different = difference(&name, template.unwrap().render(&messages, now), &outcome);
        assert_eq!(different, None);
    }
}

#[test]
fn prompts_of_families_of_models_are_those_of_transformers() {
    let Expected { now, families, .. } = expected();
    let Families { special_tokens, chats, templates, prompts } = families;
    assert!(templates.len() >= 60);
    let mut different = Vec::new();
    for (name, source) in templates {
        let mut config = special_tokens.clone();
        config.insert("chat_template".into(), source.into());
        let template = open(&config.into()).unwrap();
        for (Chat { messages, tools }, outcome) in chats.iter().zip(&prompts[&name]) {
            let got = template.render_values(messages.clone(), tools.clone(), 0, now);
            different.extend(difference(&name, got, outcome));
        }
    }
    assert!(different.is_empty(), "{}", different.join("\n"));
}

#[test]
fn expressions_have_the_values_of_python() {
    let Expected { now, expressions: Expressions { given, values }, .. } = expected();
    assert!(values.len() >= 300);
    let different: Vec<String> = values
        .iter()
        .filter_map(|(expression, outcome)| {
            let template =
                open(&json!({ "chat_template": format!("{given}{{{{ {expression} }}}}") })).unwrap();
            difference(expression, template.render(&[], now), outcome)
        })
        .collect();
    assert!(different.is_empty(), "{}", different.join("\n"));
}

#[test]
fn macros_and_call_blocks_see_the_variables_around_them() {
    for (template, expected) in [
        ("{% set p = 'abc' %}{% macro m(x) %}{{ p[x:] }}{% endmacro %}{{ m(1) }}", "bc"),
        (
            "{% set p = 'abc' %}{% macro m(x=p[1:]) %}{{ x }}{{ p }}{% endmacro %}{{ m() }}{{ m(1) }}",
            "bcabc1abc",
        ),
        ("{% set x = 'a' %}{% macro m() %}{% set x = x ~ 'b' %}{{ x }}{% endmacro %}{{ m() }}{{ x }}", "aba"),
        ("{% set x = 'a' %}{% macro m() %}{% with x = x %}{{ x }}{% endwith %}{% endmacro %}{{ m() }}", "a"),
        (
            "{% set n = namespace(a=1) %}{% macro m(x) %}{% set n.a = x %}{% endmacro %}{{ m(5) }}{{ n.a }}",
            "5",
        ),
        ("{% set x = 'a' %}{% macro m(x) -%}\n {{ x }}\n{% endmacro %}{{ m() }}|{{ m(2) }}", "\n|2\n"),
        (
            "{% macro m() %}{{ caller()[1:] }}{% endmacro %}{% set y = 'de' %}{% call m() %}{{ y[:1] }}{{ y }}{% endcall %}",
            "de",
        ),
    ] {
        assert_eq!(rendered(template).unwrap(), expected, "{template}");
    }
}

#[test]
fn macros_and_loops_are_callable() {
    let template = "{% macro m() %}{% endmacro %}{% for i in [1] %}{{ m is callable }}{{ loop is callable }}{% endfor %}";
    assert_eq!(rendered(template).unwrap(), "TrueTrue");
}

#[test]
fn the_template_is_that_of_its_own_file_or_the_one_called_default() {
    let several =
        json!([{ "name": "tool_use", "template": "tools" }, { "name": "default", "template": "mine" }]);
    let folder = folder(&json!({ "chat_template": several }));
    let now = expected().now;
    let render = || ChatTemplate::open(folder.path()).unwrap().render(&[], now).unwrap();
    assert_eq!(render(), "mine");
    std::fs::write(folder.path().join("chat_template.jinja"), "own").unwrap();
    assert_eq!(render(), "own");
}

#[test]
fn files_of_templates_replace_those_of_the_configuration_as_in_transformers() {
    let (now, one, several) =
        (expected().now, json!("one"), json!([{ "name": "default", "template": "list" }]));
    let additional = |name: &str| format!("additional_chat_templates/{name}");
    for (own, files, chosen) in [
        (&one, &[("chat_template.jinja", "own"), ("tool_use.jinja", "t")][..], Ok("own")),
        (&several, &[("chat_template.jinja", "own"), ("tool_use.jinja", "{% if")], Ok("own")),
        (&several, &[("chat_template.jinja", "own"), ("default.jinja", "more")], Ok("more")),
        (&one, &[("default.jinja", "more"), ("rag.jinja", "r")], Ok("more")),
        (&several, &[("rag.jinja", "r"), ("tool_use.jinja", "t")], Err("(rag, tool_use)")),
        (&one, &[("tool_use.jinja", "t")], Err("(tool_use)")),
        (&one, &[("tool_use.txt", "t")], Ok("one")),
        (&several, &[], Ok("list")),
    ] {
        let folder = folder(&json!({ "chat_template": own }));
        std::fs::create_dir(folder.path().join("additional_chat_templates")).unwrap();
        // A folder is no template, whatever its name.
        std::fs::create_dir(folder.path().join(additional("folder.jinja"))).unwrap();
        for (name, text) in files {
            let name = if *name == "chat_template.jinja" { (*name).into() } else { additional(name) };
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        match (ChatTemplate::open(folder.path()), chosen) {
            (Ok(template), Ok(text)) => assert_eq!(template.render(&[], now).unwrap(), text, "{files:?}"),
            (Err(error), Err(names)) => {
                let said = error.to_string();
                let place = "additional_chat_templates: of its chat templates ";
                assert!(said.contains(&format!("{place}{names} none is called `default`")), "{said}");
            }
            (got, _) => panic!("{files:?}: {got:?}"),
        }
    }
}

#[test]
fn a_folder_without_the_one_template_is_refused_with_what_it_has() {
    let refused = |config: &serde_json::Value| match open(config).unwrap_err() {
        Error::Chat(error) => error,
        other => panic!("{other}"),
    };
    for none in [json!({}), json!({ "chat_template": null })] {
        assert!(matches!(refused(&none), ChatError::NoTemplate(_)));
    }
    for none in [json!([]), json!({})] {
        assert!(matches!(refused(&json!({ "chat_template": none })), ChatError::NoDefault { .. }));
    }
    let several = json!([{ "name": "tool_use", "template": "" }, { "name": "rag", "template": "" }]);
    let error = refused(&json!({ "chat_template": several })).to_string();
    assert!(error.contains("(rag, tool_use)") && error.contains("chat_template.jinja"), "{error}");
    let error = refused(&json!({ "chat_template": 3 })).to_string();
    assert!(
        error.contains("tokenizer_config.json: `chat_template`: expected a string, or a list"),
        "{error}"
    );
    let error = rendered("{% if %}").unwrap_err().to_string();
    assert!(error.contains("the chat template of ") && error.contains("tokenizer_config.json"), "{error}");
}

#[test]
fn a_folder_that_cannot_be_read_is_a_file_error() {
    let folder = folder(&json!({}));
    std::fs::create_dir(folder.path().join("chat_template.jinja")).unwrap();
    let error = ChatTemplate::open(folder.path()).unwrap_err();
    assert!(matches!(&error, Error::File { file, .. } if file.ends_with("chat_template.jinja")), "{error}");
}

#[test]
fn the_time_is_that_of_the_rank_which_gave_it() {
    let template = open(&json!({ "chat_template": "{{ strftime_now('%Y-%m-%d %H:%M') }}" })).unwrap();
    let at = |seconds, offset| template.render(&[], ChatTime { seconds, offset });
    assert_eq!(at(1_709_251_199, 0).unwrap(), "2024-02-29 23:59");
    assert_eq!(at(1_709_251_199, 3600).unwrap(), "2024-03-01 00:59");
    assert!(at(i64::MAX, 0).unwrap_err().to_string().contains("is not a time"));
    assert!(rendered("{{ strftime_now('%!') }}").unwrap_err().to_string().contains("not a format of dates"));
}

#[test]
fn options_that_tojson_does_not_have_are_refused() {
    for wrong in
        ["tojson(colour=1)", "tojson(separators=(',',))", "tojson(1, 2, 3, 4, 5)", "tojson(separators=3)"]
    {
        assert!(rendered(&format!("{{{{ messages | {wrong} }}}}")).is_err(), "{wrong}");
    }
}

#[test]
fn templates_that_take_too_much_are_refused() {
    let brackets = format!("{{{{ {}1{} }}}}", "(".repeat(1000), ")".repeat(1000));
    for (template, expected) in [
        ("{{ 'a' * 10 ** 9 }}", "repeated string is too large"),
        ("{{ range(10 ** 12) | list }}", "range has too many elements"),
        (&brackets, "recursion limit"),
        (&"{% if 1 %}".repeat(100_000), "recursion limit"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion limit"),
        ("{{ raise_exception('a' * 10 ** 7) }}", "aaa…"),
        ("{{ 'a'.zfill(10 ** 12) }}", "larger than a prompt may be"),
        ("{{ messages | nothing }}", "unknown filter"),
    ] {
        let error = rendered(template).unwrap_err().to_string();
        assert!(error.contains(expected) && error.len() < 2000, "{error}");
    }
}

#[test]
fn templates_that_differ_have_digests_that_differ() {
    let digest = |config| open(&config).unwrap().digest();
    let one = digest(json!({ "chat_template": "x", "bos_token": "<s>" }));
    assert_eq!(one, digest(json!({ "bos_token": "<s>", "chat_template": "x" })));
    assert_ne!(one, digest(json!({ "chat_template": "x", "eos_token": "<s>" })));
    assert_ne!(one, digest(json!({ "chat_template": "y", "bos_token": "<s>" })));
}
