//! Layers, provenance, and the words in which a wrong configuration is refused.

use ryzanstein_config::{BackendChoice, ByteSize, Config, ConfigError, Source, Sources, keys};
use std::path::PathBuf;

fn environment(pairs: &[(&str, &str)]) -> Sources {
    Sources {
        environment: pairs.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect(),
        ..Sources::default()
    }
}

/// The folder lives as long as the test wants the file.
fn file(text: &str) -> (tempfile::TempDir, Sources, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ryzanstein.toml");
    std::fs::write(&path, text).unwrap();
    (folder, Sources { file: Some(path.clone()), ..Sources::default() }, path)
}

fn refusal(sources: &Sources) -> String {
    Config::load(sources).unwrap_err().to_string()
}

/// Returns the refusal of a file with this text, without its folder.
fn file_refusal(text: &str) -> String {
    let (folder, sources, _) = file(text);
    refusal(&sources).replace(&format!("{}/", folder.path().display()), "")
}

#[test]
fn nothing_given_is_the_default() {
    let config = Config::load(&Sources::default()).unwrap();
    assert_eq!(config, Config::default());
    assert!(config.entries().iter().all(|entry| entry.source == Source::Default));
}

#[test]
fn a_variable_or_flag_that_is_not_text_is_refused_by_name() {
    let mut sources = environment(&[("RYZ_JOB__NAME", "caf\u{fffd}"), ("OTHER", "\u{fffd}")]);
    let wanted = "the environment variable RYZ_JOB__NAME is not UTF-8 text; change it, or leave it out";
    assert_eq!(refusal(&sources), wanted);
    sources.environment.remove(0);
    Config::load(&sources).unwrap();
    sources.flags = vec![("launch.log_dir".into(), "caf\u{fffd}".into(), "--log-dir".into())];
    assert_eq!(refusal(&sources), "the flag --log-dir is not UTF-8 text; change it, or leave it out");
}

#[test]
fn every_layer_overrides_the_one_before_and_leaves_the_rest() {
    let (_folder, mut sources, path) = file(
        "[process_group]\ntimeout = '1s'\ncoalesce = '1MiB'\nself_check = false\n[process_group.tcp]\nspin = '0s'\n",
    );
    sources.environment = environment(&[
        ("RYZ_PROCESS_GROUP__TIMEOUT", "2s"),
        ("RYZ_PROCESS_GROUP__COALESCE", "2MiB"),
        ("HOME", "/root"),
    ])
    .environment;
    sources.flags = vec![("process_group.timeout".into(), "3s".into(), "--timeout".into())];
    let config = Config::load(&sources).unwrap();

    assert_eq!(config.process_group.timeout.get().as_secs(), 3);
    assert_eq!(config.process_group.coalesce, ByteSize::mib(2));
    assert!(!config.process_group.self_check);
    assert!(config.process_group.tcp.spin.is_zero());
    assert_eq!(config.process_group.backend, BackendChoice::Auto);
    assert_eq!(config.source_of("process_group.timeout"), Some(Source::Flag("--timeout".into())));
    assert_eq!(
        config.source_of("process_group.coalesce"),
        Some(Source::Environment("RYZ_PROCESS_GROUP__COALESCE".into()))
    );
    assert_eq!(config.source_of("process_group.self_check"), Some(Source::File(path.clone())));
    assert_eq!(config.source_of("process_group.tcp.spin"), Some(Source::File(path)));
    assert_eq!(config.source_of("process_group.backend"), Some(Source::Default));
    assert_eq!(config.source_of("process_group.nonsense"), None);
}

#[test]
fn the_later_of_two_flags_for_one_key_counts() {
    let flag = |value: &str| ("job.world_size".to_owned(), value.to_owned(), "--world-size".to_owned());
    let config = Config::load(&Sources { flags: vec![flag("2"), flag("4")], ..Sources::default() }).unwrap();
    assert_eq!(config.job.world_size.unwrap().get(), 4);
}

#[test]
fn a_field_assigned_after_loading_comes_from_code() {
    let mut config = Config::load(&environment(&[("RYZ_JOB__NAME", "night")])).unwrap();
    assert_eq!(config.source_of("job.name"), Some(Source::Environment("RYZ_JOB__NAME".into())));
    config.job.name = "day".into();
    assert_eq!(config.source_of("job.name"), Some(Source::Code));
}

#[test]
fn a_value_equal_to_the_default_still_says_who_wrote_it() {
    let config = Config::load(&environment(&[("RYZ_LOG__LEVEL", "info")])).unwrap();
    assert_eq!(config.source_of("log.level"), Some(Source::Environment("RYZ_LOG__LEVEL".into())));
}

#[test]
fn the_empty_text_unsets_an_optional_value() {
    let (_folder, mut sources, _) = file("[process_group.tcp]\ninterface = 'eth0'\n");
    sources.environment = environment(&[("RYZ_PROCESS_GROUP__TCP__INTERFACE", "")]).environment;
    assert_eq!(Config::load(&sources).unwrap().process_group.tcp.interface, None);
}

#[test]
fn values_need_no_quotes_in_toml_where_toml_has_the_type() {
    let (_folder, sources, _) = file(
        "[job]\nworld_size = 8\n[process_group]\nself_check = false\ncoalesce = 4096\n[model]\ntop_p = 0.9\n\
         temperature = 1\n\
         seed = 9223372036854775807",
    );
    let config = Config::load(&sources).unwrap();
    assert_eq!(config.job.world_size.unwrap().get(), 8);
    assert!(!config.process_group.self_check);
    assert_eq!(config.process_group.coalesce, ByteSize::bytes(4096));
    assert_eq!((config.model.top_p.get(), config.model.temperature.get()), (0.9, 1.0));
    assert_eq!(config.model.seed, i64::MAX as u64);
}

#[test]
fn what_a_launcher_tells_its_ranks_is_not_a_setting() {
    let reserved = ["RYZ_RENDEZVOUS", "RYZ_EPOCH", "RYZ_SECRET_FD", "RYZ_SECRET_FILE", "RYZ_CONFIG"]
        .map(|name| (name, "x"));
    assert_eq!(Config::load(&environment(&reserved)).unwrap(), Config::default());
}

#[test]
fn what_kubernetes_sets_for_a_service_is_not_a_setting() {
    let of_services = [
        ("RYZ_SERVICE_HOST", "10.0.0.1"),
        ("RYZ_SERVICE_PORT", "80"),
        ("RYZ_SERVER_SERVICE_PORT_HTTP", "80"),
        ("RYZ_PORT", "tcp://10.0.0.1:80"),
        ("RYZ_PORT_80_TCP", "tcp://10.0.0.1:80"),
        ("RYZ_PORT_80_TCP_PROTO", "tcp"),
        ("RYZ_PORT_80_TCP_PORT", "80"),
        ("RYZ_A_PORT_53_UDP_ADDR", "10.0.0.1"),
    ];
    assert_eq!(Config::load(&environment(&of_services)).expect("ignored"), Config::default());
    for name in ["RYZ_PORT", "RYZ_SERVICE_PORTS", "RYZ_PORT_X_TCP", "RYZ_RENDEZVOUS__PORT"] {
        assert!(refusal(&environment(&[(name, "80")])).contains(name), "{name}");
    }
}

#[test]
fn the_default_file_may_be_absent_and_counts_when_it_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ryzanstein.toml");
    let sources = Sources { default_file: Some(path.clone()), ..Sources::default() };
    assert_eq!(Config::load(&sources).unwrap(), Config::default());
    std::fs::write(&path, "job.name = 'found'").unwrap();
    assert_eq!(Config::load(&sources).unwrap().job.name, "found");
}

#[test]
fn a_file_named_explicitly_must_be_there() {
    let sources = Sources { file: Some("/nowhere/ryzanstein.toml".into()), ..Sources::default() };
    assert_eq!(
        refusal(&sources),
        "cannot read the configuration file /nowhere/ryzanstein.toml: No such file or directory (os error 2)"
    );
}

#[test]
fn a_file_that_is_not_toml_is_refused_with_the_line() {
    // The reasons are the TOML parser's own wording.
    let way = "; a line is `[section]` or `key = value`, with text in quotes\n";
    for (text, reason, quoted) in [
        (
            "[job]\nname = \n",
            "line 2, column 8: invalid string: expected `\"`, `'`",
            "    name = \n           ^",
        ),
        ("[job\r\n", "line 1, column 5: invalid table header: expected `.`, `]`", "    [job\n        ^"),
        ("<html>", "line 1, column 1: invalid key", "    <html>\n    ^"),
        (
            "[job]\nname = 'ü' 2",
            "line 2, column 12: expected newline, `#`",
            "    name = 'ü' 2\n               ^",
        ),
    ] {
        let message = file_refusal(text);
        assert_eq!(message, format!("ryzanstein.toml is not well-formed TOML: {reason}{way}{quoted}"));
    }
}

#[test]
fn of_a_long_line_that_is_not_toml_only_the_place_is_quoted() {
    let message = file_refusal(&format!("a = {}", "[".repeat(1000)));
    assert!(message.contains("line 1, column 84: recursion limit exceeded"), "{message}");
    assert!(message.lines().all(|line| line.len() < 200), "{message}");
}

#[test]
fn a_misspelled_name_in_the_file_is_refused_with_the_nearest() {
    assert_eq!(
        file_refusal("[process_group]\ntiemout = '3s'\n"),
        "unknown setting: `process_group.tiemout` (file ryzanstein.toml); did you mean `process_group.timeout`?"
    );
    assert_eq!(
        file_refusal("[proces_group]\ntimeout = '3s'\n"),
        "unknown setting: `proces_group` (file ryzanstein.toml); did you mean `process_group`?"
    );
}

#[test]
fn a_name_under_the_wrong_section_is_found_under_the_right_one() {
    assert_eq!(
        file_refusal("shared_memory = true\n"),
        "unknown setting: `shared_memory` (file ryzanstein.toml); did you mean `process_group.tcp.shared_memory`?"
    );
}

#[test]
fn a_flag_that_stands_for_two_settings_is_refused_once() {
    let flag = |key: &str, value: &str| (key.to_owned(), value.to_owned(), "--timeout".to_owned());
    let load = |flags| Config::load(&Sources { flags, ..Sources::default() }).unwrap_err();
    let error = load(vec![flag("process_group.timeout", "abc"), flag("rendezvous.timeout", "abc")]);
    assert_eq!(error.problems().len(), 1, "{error}");
    let error = load(vec![flag("process_group.timeout", "abc"), flag("process_group.coalesce", "abc")]);
    assert_eq!(error.problems().len(), 2, "another reason is another problem: {error}");
}

#[test]
fn a_name_like_no_other_is_refused_with_the_way_to_the_list() {
    assert_eq!(
        file_refusal("[job]\nquux_of_the_day = 1\n"),
        "unknown setting: `job.quux_of_the_day` (file ryzanstein.toml); `ryz config show` lists those there are"
    );
}

#[test]
fn a_misspelled_variable_is_refused_with_the_nearest() {
    assert_eq!(
        refusal(&environment(&[("RYZ_PROCESS_GROUP_TIMEOUT", "3s")])),
        "unknown setting: environment variable `RYZ_PROCESS_GROUP_TIMEOUT`; did you mean `RYZ_PROCESS_GROUP__TIMEOUT`?"
    );
}

#[test]
fn a_misspelled_key_of_a_flag_is_refused_with_the_nearest() {
    let flags = vec![("job.wold_size".into(), "4".into(), "--set job.wold_size".into())];
    assert_eq!(
        refusal(&Sources { flags, ..Sources::default() }),
        "unknown setting: `job.wold_size` (flag --set job.wold_size); did you mean `job.world_size`?"
    );
}

#[test]
fn a_section_where_a_setting_was_needed_is_refused_with_its_settings() {
    assert_eq!(
        file_refusal("metrics = '0.0.0.0:9090'\n"),
        "`metrics` (file ryzanstein.toml) is a section, not a setting; the settings in it are `metrics.address`, \
         `metrics.launcher_address`"
    );
    assert_eq!(
        refusal(&environment(&[("RYZ_LOG", "debug")])),
        "environment variable `RYZ_LOG` is a section, not a setting; the settings in it are `RYZ_LOG__LEVEL`, \
         `RYZ_LOG__FORMAT`"
    );
}

#[test]
fn a_quoted_name_with_dots_is_not_taken_for_a_setting() {
    assert_eq!(
        file_refusal("\"job.name\" = 'x'\n"),
        "unknown setting: `\"job.name\"` (file ryzanstein.toml); did you mean `job.name`?"
    );
}

#[test]
fn a_bare_number_is_no_duration() {
    let expected = "expected a duration with its unit (ns, us, ms, s, m, h, d), more than zero and at most 365d, such as \
                    `30s`, not `30` (the unit is missing: write `30s` for seconds or `30ms` for milliseconds)";
    assert_eq!(
        file_refusal("[process_group]\ntimeout = 30\n"),
        format!("`process_group.timeout` (file ryzanstein.toml): {expected}")
    );
    assert_eq!(
        refusal(&environment(&[("RYZ_PROCESS_GROUP__TIMEOUT", "30")])),
        format!("`process_group.timeout` (environment variable RYZ_PROCESS_GROUP__TIMEOUT): {expected}")
    );
}

#[test]
fn a_wrong_value_is_refused_with_its_source_what_was_expected_and_an_example() {
    for (key, value, message) in [
        ("job.world_size", "0", "expected a whole number from 1 to 65536, such as `8`, not `0`"),
        ("job.world_size", "many", "expected a whole number from 1 to 65536, such as `8`, not `many`"),
        ("launch.nnodes", "-1", "expected a whole number from 1 to 4294967295, such as `4`, not `-1`"),
        ("process_group.self_check", "yes", "expected true or false, such as `true`, not `yes`"),
        (
            "process_group.backend",
            "ncll",
            "expected one of auto, nccl, tcp (or gloo), such as `auto`, not `ncll` (did you mean `nccl`?)",
        ),
        (
            "process_group.coalesce",
            "25mb",
            "expected a size in bytes, or a number with a unit (KB, MB, GB, TB; KiB or K, MiB or M, GiB or G, TiB or T), such as \
             `25MiB`, not `25mb` (`mb` is not a unit of size)",
        ),
        (
            "rendezvous.address",
            "node0",
            "expected HOST:PORT, with a port from 0 to 65535, such as `node0:29500`, not `node0` (the port is missing)",
        ),
        (
            "rendezvous.address",
            "::1",
            "expected HOST:PORT, with a port from 0 to 65535, such as `node0:29500`, not `::1` (an IPv6 address \
             stands in brackets: `[::1]:29500`)",
        ),
        ("model.top_p", "0", "expected a number more than 0 and at most 1, such as `0.9`, not `0`"),
        ("model.temperature", "NaN", "expected a number, 0 or more, such as `0.7`, not `NaN`"),
        ("job.name", "", "expected text that is not empty, such as `ryzanstein`, not nothing"),
    ] {
        let flags = vec![(key.to_owned(), value.to_owned(), "--flag".to_owned())];
        let expected = format!("`{key}` (flag --flag): {message}");
        assert_eq!(refusal(&Sources { flags, ..Sources::default() }), expected);
    }
}

#[test]
fn every_kind_of_setting_refuses_what_it_cannot_be_by_its_variable() {
    let table: &[(&str, &[&str], &str)] = &[
        (
            "JOB__WORLD_SIZE",
            &["-1", "1.5", "65537", "4294967296", "99999999999999999999999"],
            "from 1 to 65536",
        ),
        ("JOB__NAME", &["", " "], "text that is not empty"),
        ("LAUNCH__NNODES", &["0", "x", "4294967296"], "a whole number from 1"),
        ("LAUNCH__NODE_RANK", &["-1", "one"], "a whole number from 0"),
        ("LAUNCH__MAX_RESTARTS", &["1.5", "many", "4294967296"], "a whole number from 0"),
        ("LAUNCH__GRACE", &["4", "-1s", "forever"], "a duration"),
        (
            "RENDEZVOUS__ADDRESS",
            &["node:x", "node:65536", ":29500"],
            "HOST:PORT, with a port from 0 to 65535",
        ),
        ("RENDEZVOUS__TIMEOUT", &["0s", "30", "366d"], "more than zero and at most 365d"),
        ("PROCESS_GROUP__BACKEND", &["mpi", ""], "one of auto, nccl, tcp"),
        ("PROCESS_GROUP__TIMEOUT", &["0ms", "99999999999999999999d"], "more than zero and at most 365d"),
        ("PROCESS_GROUP__SELF_CHECK", &["yes", "1", ""], "true or false"),
        ("PROCESS_GROUP__COALESCE", &["25mb", "-1", "1.5MiB", "99999999999TiB"], "a size in bytes"),
        ("PROCESS_GROUP__TUNING", &["", " "], "auto, off, or the path of a file"),
        ("MODEL__DTYPE", &["f64", "int8"], "one of"),
        ("MODEL__TEMPERATURE", &["-1", "NaN", "inf", "hot"], "a number, 0 or more"),
        ("RENDEZVOUS__MAX_MESSAGE", &["0", "100", "16383"], "at least 16KiB"),
        ("MODEL__TOP_P", &["0", "1.5", "NaN"], "more than 0 and at most 1"),
        ("MODEL__SEED", &["-1", "18446744073709551616"], "a whole number from 0"),
        ("MODEL__MAX_NEW_TOKENS", &["-1", "4294967296"], "a whole number from 0"),
        ("MODEL__GRAPH", &["on"], "true or false"),
        ("NCCL__PROFILE", &["fast", ""], "one of none, inference"),
        ("NCCL__ENV", &["NCCL_DEBUG", "DEBUG=INFO", "NCCL_A=1 NCCL_A=2"], "NCCL_NAME=value"),
        ("LAYOUT__TENSOR_PARALLEL", &["0"], "a whole number from 1"),
        ("METRICS__ADDRESS", &["localhost:9090", "127.0.0.1"], "an IP address and a port"),
        ("LOG__FORMAT", &["xml"], "one of text, json"),
    ];
    for (key, values, expected) in table {
        for value in *values {
            let name = format!("RYZ_{key}");
            let said = refusal(&environment(&[(&name, value)]));
            let words = [*expected, &name, "such as `"];
            assert!(words.iter().all(|word| said.contains(word)), "{value}: {said}");
        }
    }
    for (text, expected) in [
        ("[job]\nworld_size = -1\n", "from 1 to 65536, such as `8`, not `-1`"),
        ("[job]\nworld_size = 1.5\n", "from 1 to 65536, such as `8`, not `1.5`"),
        ("[model]\ntemperature = nan\n", "a number, 0 or more"),
        ("[model]\ntop_p = inf\n", "more than 0 and at most 1"),
        ("[[job]]\nname = 'x'\n", "`job`"),
    ] {
        assert!(file_refusal(text).contains(expected), "{}", file_refusal(text));
    }
}

#[test]
fn a_table_a_list_or_a_date_is_no_value() {
    assert_eq!(
        file_refusal("[launch.grace]\nseconds = 3\n[job]\nname = ['a']\n[log]\nlevel = 1979-05-27\n"),
        "3 problems in the configuration:\
         \n  - `job.name` (file ryzanstein.toml): expected text that is not empty, such as `ryzanstein`, not a list\
         \n  - `launch.grace` (file ryzanstein.toml): expected a duration with its unit (ns, us, ms, s, m, h, d), \
         at most 365d, such as `30s`, not a table\
         \n  - `log.level` (file ryzanstein.toml): expected text that is not empty, such as `ryzanstein`, not a date"
    );
}

#[test]
fn a_nul_in_a_value_is_refused_by_the_name_of_the_setting() {
    assert_eq!(
        file_refusal("[job]\nname = \"a\\u0000b\"\n"),
        "`job.name` (file ryzanstein.toml): expected text that is not empty, such as `ryzanstein`, not text with a NUL"
    );
}

#[test]
fn all_problems_are_reported_at_once() {
    let (_folder, mut sources, path) = file("[job]\nnmae = 'x'\nworld_size = 0\n");
    sources.environment =
        environment(&[("RYZ_LOG__FROMAT", "json"), ("RYZ_LOG__FORMAT", "yaml")]).environment;
    let error = Config::load(&sources).unwrap_err();
    assert_eq!(error.problems().len(), 4);
    assert_eq!(
        error.to_string(),
        format!(
            "4 problems in the configuration:\
             \n  - unknown setting: `job.nmae` (file {path}); did you mean `job.name`?\
             \n  - unknown setting: environment variable `RYZ_LOG__FROMAT`; did you mean `RYZ_LOG__FORMAT`?\
             \n  - `job.world_size` (file {path}): expected a whole number from 1 to 65536, such as `8`, not `0`\
             \n  - `log.format` (environment variable RYZ_LOG__FORMAT): expected one of text, json, \
             such as `text`, not `yaml`",
            path = path.display()
        )
    );
}

#[test]
fn an_unreadable_file_does_not_hide_a_misspelled_variable() {
    let mut sources = environment(&[("RYZ_JOB__NMAE", "x")]);
    sources.file = Some("/nowhere/ryzanstein.toml".into());
    let error = Config::load(&sources).unwrap_err();
    assert!(matches!(
        error.problems(),
        [ConfigError::Unreadable { .. }, ConfigError::UnknownKey { nearest: Some(near), .. }] if near == "RYZ_JOB__NAME"
    ));
}

#[test]
fn a_flag_mends_a_wrong_value_in_the_file() {
    let (_folder, mut sources, _) = file("[process_group]\ntimeout = 30\n");
    sources.flags = vec![("process_group.timeout".into(), "30s".into(), "--timeout".into())];
    assert_eq!(Config::load(&sources).unwrap().process_group.timeout.get().as_secs(), 30);
}

#[test]
fn a_node_beyond_the_last_is_refused() {
    assert_eq!(
        refusal(&environment(&[("RYZ_LAUNCH__NODE_RANK", "2"), ("RYZ_LAUNCH__NNODES", "2")])),
        "`launch.node_rank` is 2 (environment variable RYZ_LAUNCH__NODE_RANK), but `launch.nnodes` is 2 (environment \
         variable RYZ_LAUNCH__NNODES): nodes are counted from 0, so the last is 1"
    );
}

#[test]
fn a_refused_value_causes_no_second_complaint() {
    let message = refusal(&environment(&[("RYZ_LAUNCH__NODE_RANK", "1"), ("RYZ_LAUNCH__NNODES", "two")]));
    assert!(message.starts_with("`launch.nnodes` (environment variable RYZ_LAUNCH__NNODES): "), "{message}");
}

#[test]
fn every_default_is_written_as_it_is_shown() {
    for (key, entry) in keys().zip(Config::default().entries()) {
        assert_eq!((key.key, key.default), (entry.key, entry.value.as_str()));
    }
}

#[test]
fn every_setting_is_documented_and_takes_its_own_example_from_the_environment() {
    for key in keys() {
        assert!(key.doc.ends_with('.') && !key.doc.contains("  "), "{}: {:?}", key.key, key.doc);
        let name = key.environment_variable();
        // The second node of one would be refused for another reason.
        let example = if key.key == "launch.node_rank" { "0" } else { key.example };
        let config = Config::load(&environment(&[(&name, example)])).unwrap();
        assert_eq!(config.source_of(key.key), Some(Source::Environment(name)));
    }
}

#[test]
fn what_is_shown_reads_back_to_the_same_configuration() {
    let (_folder, sources, _) = file(
        "[job]\nworld_size = 8\n[rendezvous]\naddress = '[::1]:0'\nbind = '10.0.0.1'\nmax_message = 20000\n\
         [process_group]\nbackend = 'gloo'\ntimeout = '1h30m'\n[model]\ntemperature = 0.1\ndtype = 'bf16'\n",
    );
    let config = Config::load(&sources).unwrap();
    let flags = config.entries().into_iter().map(|entry| (entry.key.into(), entry.value, "--again".into()));
    assert_eq!(Config::load(&Sources { flags: flags.collect(), ..Sources::default() }).unwrap(), config);
}
