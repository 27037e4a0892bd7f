//! Settings that NCCL gets, and their sources.

use ryzanstein_config::nccl::{NcclSource, NcclVariable, UserVariable, advice, conf_file, missing, plan};
use ryzanstein_config::{Config, NcclProfile, Source, Sources};

fn with_flags(flags: &[(&str, &str)]) -> Config {
    let flags = flags.iter().map(|(key, value)| ((*key).into(), (*value).into(), "--set".into())).collect();
    Config::load(&Sources { flags, ..Sources::default() }).expect("loads")
}

fn own(pairs: &[(&str, &str)]) -> Vec<UserVariable> {
    pairs
        .iter()
        .map(|(name, value)| UserVariable { name: (*name).into(), value: (*value).into(), file: None })
        .collect()
}

fn of_file(name: &str, value: &str, file: &str) -> UserVariable {
    UserVariable { name: name.into(), value: value.into(), file: Some(file.into()) }
}

fn find<'a>(plan: &'a [NcclVariable], name: &str) -> &'a NcclVariable {
    plan.iter().find(|v| v.name == name).unwrap_or_else(|| panic!("{name} is not in {plan:?}"))
}

/// A table of several kinds of values, as a file holds it.
const TABLE: &str =
    "[nccl.env]\nNCCL_DEBUG = \"INFO\"\nNCCL_MAX_CTAS = 8\nNCCL_ALGO = \"Ring;allreduce:Tree\"\n";

fn with_file(text: &str, flags: &[(&str, &str)]) -> Result<Config, ryzanstein_config::ConfigError> {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("ryzanstein.toml");
    std::fs::write(&file, text).expect("written");
    let flags = flags.iter().map(|(key, value)| ((*key).into(), (*value).into(), "--set".into())).collect();
    Config::load(&Sources { file: Some(file), flags, ..Sources::default() })
}

fn refused(key: &str, value: &str) -> String {
    let flags = vec![(key.to_owned(), value.to_owned(), "--set".to_owned())];
    Config::load(&Sources { flags, ..Sources::default() }).expect_err(value).to_string()
}

#[test]
fn nothing_is_set_by_default() {
    assert_eq!(plan(&Config::default(), &[]), []);
}

#[test]
fn the_map_is_passed_on_as_it_is_from_a_table_and_from_text() {
    let expected = [("NCCL_ALGO", "Ring;allreduce:Tree"), ("NCCL_DEBUG", "INFO"), ("NCCL_MAX_CTAS", "8")];
    let text = "NCCL_MAX_CTAS=8 NCCL_DEBUG=INFO NCCL_ALGO=Ring;allreduce:Tree";
    for config in [with_file(TABLE, &[]).expect("loads"), with_flags(&[("nccl.env", text)])] {
        let plan = plan(&config, &[]);
        let found: Vec<_> = plan.iter().map(|v| (v.name.as_str(), v.value.as_str())).collect();
        assert_eq!(found, expected);
        assert!(plan.iter().all(|v| matches!(v.source, NcclSource::Setting(_))));
        let shown = config.nccl.env.to_string();
        assert_eq!(shown.parse(), Ok(config.nccl.env), "what is shown reads back");
    }
    let spaces = with_file("[nccl.env]\nNCCL_DEBUG_FILE = \"/var/my logs/x\"\n", &[]).expect("loads");
    assert_eq!(spaces.nccl.env.get("NCCL_DEBUG_FILE"), Some("/var/my logs/x"));
    assert_eq!(spaces.nccl.env.to_string().parse(), Ok(spaces.nccl.env.clone()), "what is shown reads back");
    let flag = with_file(TABLE, &[("nccl.env", "NCCL_DEBUG=WARN")]).expect("loads");
    assert_eq!(missing(&flag, &[]), [("NCCL_DEBUG".into(), "WARN".into())], "a flag replaces the table");
}

#[test]
fn the_users_own_variable_wins_over_map_and_profile_and_shows_what_was_set_aside() {
    let config = with_flags(&[("nccl.profile", "debug"), ("nccl.env", "NCCL_DEBUG=WARN")]);
    let plan = plan(&config, &own(&[("NCCL_DEBUG", "TRACE")]));
    let debug = find(&plan, "NCCL_DEBUG");
    assert_eq!((debug.value.as_str(), &debug.source), ("TRACE", &NcclSource::Environment));
    let (value, by) = debug.overridden.as_ref().expect("the map is overridden");
    assert_eq!((value.as_str(), by), ("WARN", &NcclSource::Setting(Source::Flag("--set".into()))));
    assert!(missing(&config, &own(&[("NCCL_DEBUG", "TRACE")])).iter().all(|(name, _)| name != "NCCL_DEBUG"));
}

#[test]
fn the_map_wins_over_the_profile() {
    let plan = plan(&with_flags(&[("nccl.profile", "inference"), ("nccl.env", "NCCL_MAX_CTAS=4")]), &[]);
    assert_eq!(find(&plan, "NCCL_MAX_CTAS").value, "4");
    assert!(matches!(find(&plan, "NCCL_DEBUG").source, NcclSource::Profile(NcclProfile::Inference, _)));
}

#[test]
fn another_variable_of_the_same_matter_keeps_the_profiles_away() {
    let config = with_flags(&[("nccl.profile", "inference")]);
    let users = plan(&config, &own(&[("NCCL_MAX_NCHANNELS", "2")]));
    assert!(users.iter().all(|v| v.name != "NCCL_MAX_CTAS"), "{users:?}");
    assert_eq!(find(&users, "NCCL_MAX_NCHANNELS").overridden.as_ref().expect("ours").0, "16");
}

#[test]
fn a_profile_does_not_ask_for_more_thread_blocks_than_map_or_user_allow() {
    let map = plan(&with_flags(&[("nccl.profile", "bandwidth"), ("nccl.env", "NCCL_MAX_CTAS=8")]), &[]);
    assert!(map.iter().all(|v| v.name != "NCCL_MIN_CTAS"), "{map:?}");
    let users = plan(&with_flags(&[("nccl.profile", "bandwidth")]), &own(&[("NCCL_MAX_CTAS", "8")]));
    assert_eq!(find(&users, "NCCL_MAX_CTAS").overridden.as_ref().expect("ours").0, "NCCL_MIN_CTAS=64");
}

#[test]
fn the_environment_wins_over_files_and_files_over_ours() {
    let own = [
        of_file("NCCL_DEBUG", "INFO", "/etc/nccl.conf"),
        of_file("NCCL_PROTO", "LL", "/home/a/.nccl.conf"),
        of_file("NCCL_PROTO", "Simple", "/etc/nccl.conf"),
        UserVariable { name: "NCCL_DEBUG".into(), value: "VERSION".into(), file: None },
    ];
    let plan = plan(&with_flags(&[("nccl.env", "NCCL_DEBUG=WARN NCCL_PROTO=Simple")]), &own);
    assert_eq!(find(&plan, "NCCL_DEBUG").value, "VERSION");
    let protocol = find(&plan, "NCCL_PROTO");
    assert_eq!(
        (protocol.value.as_str(), &protocol.source),
        ("LL", &NcclSource::File("/home/a/.nccl.conf".into()))
    );
}

#[test]
fn files_of_nccl_are_read_as_nccl_reads_them() {
    let text = "# NCCL_ALGO=Ring\nNCCL_SOCKET_IFNAME==eth0\n\nNCCL_DEBUG= WARN \nOTHER=1\nnonsense\n\
                NCCL_PROTO = LL\n NCCL_MAX_CTAS=4\n #NCCL_MIN_CTAS=4\nNCCL_IB_HCA=mlx5 # not a comment";
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    assert_eq!(
        conf_file(text),
        [
            pair("NCCL_SOCKET_IFNAME", "=eth0"),
            pair("NCCL_DEBUG", " WARN "),
            pair("NCCL_IB_HCA", "mlx5 # not a comment"),
        ]
    );
}

#[test]
fn no_profile_touches_multicast_and_nccl_reads_all_that_profiles_set() {
    for profile in NcclProfile::ALL {
        let mut config = Config::default();
        config.nccl.profile = *profile;
        let off = own(&[("NCCL_NVLS_ENABLE", "0")]);
        for (name, value) in missing(&config, &[]).into_iter().chain(missing(&config, &off)) {
            let touches =
                name.contains("NVLS") || name.contains("COLLNET") || value.to_uppercase().contains("NVLS");
            assert!(!touches, "{name}={value}");
            assert_eq!(advice(&name), None, "{name}");
        }
        assert_eq!(find(&plan(&config, &off), "NCCL_NVLS_ENABLE").source, NcclSource::Environment);
    }
}

#[test]
fn names_that_nccl_does_not_read_are_explained() {
    for (name, remedy) in [
        ("NCCL_MIN_NRINGS", "NCCL_MIN_CTAS"),
        ("NCCL_NVLINK_DISABLE", "NCCL_P2P_LEVEL"),
        ("NCCL_TIMEOUT", "process_group.timeout"),
        ("NCCL_LL_THRESHOLD", "NCCL_PROTO"),
        ("NCCL_TREE_THRESHOLD", "NCCL_ALGO"),
        ("NCCL_BLOCKING_WAIT", "process_group.timeout"),
        ("NCCL_DEBUGG", "NCCL_DEBUG"),
        ("NCCL_ZZZZZZZZZZZZ", "unset it"),
    ] {
        let advice = advice(name).unwrap_or_else(|| panic!("nothing is said of {name}"));
        assert!(advice.instead.contains(remedy), "{name}: {advice:?}");
    }
    for name in ["NCCL_DEBUG", "NCCL_NVLS_ENABLE", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_VERSION"] {
        assert_eq!(advice(name), None, "{name}");
    }
}

#[test]
fn what_is_no_variable_of_nccl_is_refused_with_what_is_expected() {
    for (value, why) in [
        ("DEBUG=INFO", "`DEBUG` does not begin with NCCL_"),
        ("NCCL_DEBUG", "has no `=`"),
        ("NCCL_DEBUG_FILE=/var/my logs/%h", "`logs/%h` has no `=`"),
        ("NCCL_TIMEOUT=600", "process_group.timeout"),
        ("NCCL_IB_DISABLE=true", "write 1 or 0"),
        ("NCCL_DEBUG=INFO NCCL_DEBUG=WARN", "given twice"),
    ] {
        let error = refused("nccl.env", value);
        assert!(error.contains("nccl.env") && error.contains(why) && error.contains("--set"), "{error}");
    }
    let table = |text: &str| with_file(text, &[]).expect_err(text).to_string();
    let error = table("[nccl.env]\nDEBUG = \"INFO\"\n");
    assert!(error.contains("ryzanstein.toml") && error.contains("does not begin with NCCL_"), "{error}");
    let error = table("[nccl.env]\nNCCL_IB_HCA = [\"mlx5_0\", \"mlx5_1\"]\n");
    assert!(error.contains("a list") && error.contains("a table of NCCL's variables"), "{error}");
    let error = table("[nccl.profile]\nNCCL_DEBUG = \"INFO\"\n");
    assert!(error.contains("a table") && error.contains("one of none"), "{error}");
    let error = table("[nccl.env]\nNCCL_IB_DISABLE = true\n");
    assert!(error.contains("NCCL_IB_DISABLE") && error.contains("write 1 or 0"), "{error}");
    // Keys that would be settings elsewhere.
    for key in ["nccl.algorithm", "nccl.shared_memory", "nccl.env.NCCL_ALGO"] {
        let error = refused(key, "1");
        assert!(error.contains("did you mean `nccl.env`?") && !error.contains("process_group"), "{error}");
    }
    assert!(refused("nccl.profil", "debug").contains("`nccl.profile`"));
    assert!(table("[nccl.evn]\nNCCL_DEBUG = \"INFO\"\n").contains("`nccl.env`"));
}
