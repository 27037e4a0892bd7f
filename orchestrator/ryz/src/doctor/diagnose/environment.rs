use crate::doctor::finding::{Finding, Status};

/// Parts of the names of variables whose values are not shown.
const SECRETS: [&str; 6] = ["SECRET", "TOKEN", "PASSWORD", "PASSWD", "KEY", "CREDENTIAL"];

/// Shows the variables of CUDA and UCX, so that a report names all that may explain a job's behaviour.
pub(super) fn diagnose(variables: &[(String, String)]) -> Vec<Finding> {
    variables.iter().map(|(name, value)| one(name, value)).collect()
}

/// Returns the value of a variable unless its name is that of a secret.
pub(super) fn shown<'a>(name: &str, value: &'a str) -> &'a str {
    match value {
        _ if SECRETS.iter().any(|secret| name.contains(secret)) => "(a secret by its name: not shown)",
        "" => "empty",
        _ => value,
    }
}

fn one(name: &str, value: &str) -> Finding {
    let new = |status| Finding::new("environment", "variable", status, shown(name, value)).of(name);
    if (name, value) == ("CUDA_LAUNCH_BLOCKING", "1") {
        return new(Status::Warning)
            .because("every launch waits for its kernel, so nothing overlaps; it is meant for debuggers")
            .remedy("unset it");
    }
    new(Status::Info)
}
