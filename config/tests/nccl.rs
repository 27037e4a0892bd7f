//! What NCCL will be told, and who said so.

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

/// Every field set to something.
const EVERY_FIELD: &[(&str, &str, &str, &str)] = &[
    ("nccl.debug", "info", "NCCL_DEBUG", "INFO"),
    ("nccl.debug_subsystems", "init,graph", "NCCL_DEBUG_SUBSYS", "INIT,GRAPH"),
    ("nccl.debug_file", "/tmp/n.%h.%p", "NCCL_DEBUG_FILE", "/tmp/n.%h.%p"),
    ("nccl.algorithm", "tree", "NCCL_ALGO", "Ring;allreduce:Tree"),
    ("nccl.protocol", "simple", "NCCL_PROTO", "SIMPLE"),
    ("nccl.min_ctas", "2", "NCCL_MIN_CTAS", "2"),
    ("nccl.max_ctas", "8", "NCCL_MAX_CTAS", "8"),
    ("nccl.threads", "256", "NCCL_NTHREADS", "256"),
    ("nccl.buffer_size", "1MiB", "NCCL_BUFFSIZE", "1048576"),
    ("nccl.p2p_level", "nvl", "NCCL_P2P_LEVEL", "NVL"),
    ("nccl.gpu_direct_level", "phb", "NCCL_NET_GDR_LEVEL", "PHB"),
    ("nccl.shared_memory", "false", "NCCL_SHM_DISABLE", "1"),
    ("nccl.infiniband", "true", "NCCL_IB_DISABLE", "0"),
    ("nccl.infiniband_devices", "mlx5_0", "NCCL_IB_HCA", "mlx5_0"),
    ("nccl.ib_gid_index", "3", "NCCL_IB_GID_INDEX", "3"),
    ("nccl.ib_timeout", "22", "NCCL_IB_TIMEOUT", "22"),
    ("nccl.cross_nic", "any", "NCCL_CROSS_NIC", "1"),
    ("nccl.socket_interface", "=eth0", "NCCL_SOCKET_IFNAME", "=eth0"),
    ("nccl.launch_order", "true", "NCCL_LAUNCH_ORDER_IMPLICIT", "1"),
    ("nccl.graph_mixing", "false", "NCCL_GRAPH_MIXING_SUPPORT", "0"),
    ("nccl.topology_file", "/etc/topo.xml", "NCCL_TOPO_FILE", "/etc/topo.xml"),
    ("nccl.tuner_plugin", "libtuner.so", "NCCL_TUNER_PLUGIN", "libtuner.so"),
];

fn every_field() -> Config {
    with_flags(&EVERY_FIELD.iter().map(|(key, value, ..)| (*key, *value)).collect::<Vec<_>>())
}

#[test]
fn nothing_is_set_by_default() {
    assert_eq!(plan(&Config::default(), &[]), []);
}

#[test]
fn every_field_becomes_its_variable_and_says_so() {
    let plan = plan(&every_field(), &[]);
    assert_eq!(plan.len(), EVERY_FIELD.len());
    for (key, _, name, value) in EVERY_FIELD {
        let found = find(&plan, name);
        assert_eq!(found.value, *value, "{name}");
        assert_eq!(found.source, NcclSource::Setting(key, Source::Flag("--set".into())), "{name}");
    }
    let settable = ryzanstein_config::keys().filter(|key| key.key.starts_with("nccl.")).count();
    assert_eq!(settable, EVERY_FIELD.len() + 1, "a new field needs a row here; the other one is the profile");
}

#[test]
fn the_users_own_variable_wins_over_field_and_profile_and_shows_what_was_set_aside() {
    let config = with_flags(&[("nccl.profile", "debug"), ("nccl.debug", "warn")]);
    let plan = plan(&config, &own(&[("NCCL_DEBUG", "TRACE")]));
    let debug = find(&plan, "NCCL_DEBUG");
    assert_eq!((debug.value.as_str(), &debug.source), ("TRACE", &NcclSource::Environment));
    let (value, by) = debug.overridden.as_ref().expect("the field is overridden");
    assert_eq!(value, "WARN");
    assert!(matches!(by, NcclSource::Setting("nccl.debug", _)));
    assert!(missing(&config, &own(&[("NCCL_DEBUG", "TRACE")])).iter().all(|(name, _)| name != "NCCL_DEBUG"));
}

#[test]
fn a_field_wins_over_the_profile() {
    let plan = plan(&with_flags(&[("nccl.profile", "inference"), ("nccl.max_ctas", "4")]), &[]);
    assert_eq!(find(&plan, "NCCL_MAX_CTAS").value, "4");
    assert!(matches!(find(&plan, "NCCL_DEBUG").source, NcclSource::Profile(NcclProfile::Inference, _)));
}

#[test]
fn another_variable_of_the_same_matter_keeps_ours_away() {
    let config = with_flags(&[("nccl.profile", "inference"), ("nccl.p2p_level", "nvl")]);
    let plan = plan(&config, &own(&[("NCCL_MAX_NCHANNELS", "2"), ("NCCL_P2P_DISABLE", "1")]));
    assert!(plan.iter().all(|v| v.name != "NCCL_MAX_CTAS" && v.name != "NCCL_P2P_LEVEL"), "{plan:?}");
    assert_eq!(find(&plan, "NCCL_MAX_NCHANNELS").overridden.as_ref().expect("ours").0, "16");
}

#[test]
fn a_profile_does_not_ask_for_more_thread_blocks_than_field_or_user_allow() {
    let field = plan(&with_flags(&[("nccl.profile", "bandwidth"), ("nccl.max_ctas", "8")]), &[]);
    assert!(field.iter().all(|v| v.name != "NCCL_MIN_CTAS"), "{field:?}");
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
    let plan = plan(&with_flags(&[("nccl.debug", "warn"), ("nccl.protocol", "simple")]), &own);
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
fn nothing_touches_multicast_whatever_is_set() {
    for profile in NcclProfile::ALL {
        for fields in [false, true] {
            let mut config = if fields { every_field() } else { Config::default() };
            config.nccl.profile = *profile;
            let off = own(&[("NCCL_NVLS_ENABLE", "0")]);
            for (name, value) in missing(&config, &[]).into_iter().chain(missing(&config, &off)) {
                let touches = name.contains("NVLS")
                    || name.contains("COLLNET")
                    || value.to_uppercase().contains("NVLS");
                assert!(!touches, "{name}={value}");
            }
            let switch = plan(&config, &off);
            assert_eq!(find(&switch, "NCCL_NVLS_ENABLE").source, NcclSource::Environment);
        }
    }
}

#[test]
fn what_we_set_nccl_reads() {
    for profile in NcclProfile::ALL {
        let mut config = every_field();
        for nothing in [false, true] {
            if nothing {
                config = Config::default();
            }
            config.nccl.profile = *profile;
            for (name, _) in missing(&config, &[]) {
                assert_eq!(advice(&name), None, "{name}");
            }
        }
    }
}

#[test]
fn names_that_nccl_does_not_read_are_explained() {
    for (name, remedy) in [
        ("NCCL_MIN_NRINGS", "nccl.min_ctas"),
        ("NCCL_NVLINK_DISABLE", "nccl.p2p_level"),
        ("NCCL_TIMEOUT", "process_group.timeout"),
        ("NCCL_LL_THRESHOLD", "nccl.protocol"),
        ("NCCL_TREE_THRESHOLD", "nccl.algorithm"),
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
fn more_thread_blocks_at_least_than_at_most_are_refused() {
    let flags = [("nccl.min_ctas", "9"), ("nccl.max_ctas", "8")];
    let flags = flags.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned(), "--set".to_owned())).collect();
    let error = Config::load(&Sources { flags, ..Sources::default() }).expect_err("refused").to_string();
    assert!(error.contains("nccl.min_ctas") && error.contains("nccl.max_ctas"), "{error}");
}

#[test]
fn a_part_of_nccl_that_there_is_not_is_refused_with_the_nearest() {
    let flags = vec![("nccl.debug_subsystems".into(), "INIT,GRAHP".into(), "--set".into())];
    let error = Config::load(&Sources { flags, ..Sources::default() }).expect_err("refused").to_string();
    assert!(error.contains("GRAPH"), "{error}");
}

#[test]
fn values_that_nccl_would_not_take_are_refused() {
    for (key, value) in [
        ("nccl.threads", "96"),
        ("nccl.threads", "1024"),
        ("nccl.ib_gid_index", "256"),
        ("nccl.ib_timeout", "0"),
        ("nccl.ib_timeout", "23"),
        ("nccl.cross_nic", "3"),
        ("nccl.protocol", "ll128"),
        ("nccl.tuner_plugin", " "),
    ] {
        let flags = vec![(key.to_owned(), value.to_owned(), "--set".to_owned())];
        let error = Config::load(&Sources { flags, ..Sources::default() }).expect_err(value).to_string();
        assert!(error.contains(key) && error.contains("expected"), "{error}");
    }
    // NCCL's own numbers of the choice.
    for (number, wanted) in [("0", "0"), ("1", "1"), ("2", "2")] {
        let plan = plan(&with_flags(&[("nccl.cross_nic", number)]), &[]);
        assert_eq!(find(&plan, "NCCL_CROSS_NIC").value, wanted);
    }
}
