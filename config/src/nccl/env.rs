//! The map `[nccl.env]`.

use std::collections::BTreeMap;

use super::advice::retired;
use crate::ValueError;
use crate::setting::{Setting, public_setting};

/// NCCL's own variables: the table `[nccl.env]` of the file, or `NAME=value` pairs with spaces between them. If a value contains
/// spaces, each pair is on its own line.
///
/// ```
/// let env: ryzanstein_config::NcclEnv = "NCCL_DEBUG=INFO NCCL_ALGO=Ring;allreduce:Tree".parse()?;
/// assert_eq!(env.get("NCCL_ALGO"), Some("Ring;allreduce:Tree"));
/// assert_eq!(env.to_string(), "NCCL_ALGO=Ring;allreduce:Tree NCCL_DEBUG=INFO");
/// # Ok::<(), ryzanstein_config::ValueError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NcclEnv(BTreeMap<String, String>);

impl NcclEnv {
    /// Returns the value of a variable.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// Sets a variable.
    ///
    /// # Errors
    /// Returns an error if the name does not begin with `NCCL_`, if NCCL never reads it, or if the value has several lines.
    pub fn insert(&mut self, name: &str, value: &str) -> Result<(), ValueError> {
        check(name, value).map_err(|why| Self::refuse(format!("`{name}={value}`"), Some(why)))?;
        self.0.insert(name.to_owned(), value.to_owned());
        Ok(())
    }

    /// Iterates over names and values, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }
}

/// Returns an error with the reason if NCCL cannot be given this variable.
fn check(name: &str, value: &str) -> Result<(), String> {
    if !name.starts_with("NCCL_") {
        return Err(format!("`{name}` does not begin with NCCL_"));
    }
    if value.contains('\n') {
        return Err(format!("the value of {name} has several lines"));
    }
    if ["true", "false"].contains(&value) {
        return Err(format!("NCCL reads {name}={value} as 0; write 1 or 0"));
    }
    retired(name).map_or(Ok(()), |advice| Err(format!("{name}: {}; {}", advice.what, advice.instead)))
}

impl Setting for NcclEnv {
    const EXPECTED: &'static str =
        "a table of NCCL's variables, or NCCL_NAME=value pairs with spaces between them";
    const EXAMPLE: &'static str = "NCCL_DEBUG=INFO NCCL_MAX_CTAS=16";
    const IS_TABLE: bool = true;

    fn read(text: &str) -> Result<Self, Option<String>> {
        let mut all = Self::default();
        let pairs: Vec<&str> =
            if text.contains('\n') { text.lines().collect() } else { text.split_whitespace().collect() };
        for pair in pairs {
            let (name, value) = pair.split_once('=').ok_or_else(|| format!("`{pair}` has no `=`"))?;
            check(name, value)?;
            if all.0.insert(name.to_owned(), value.to_owned()).is_some() {
                return Err(Some(format!("{name} is given twice")));
            }
        }
        Ok(all)
    }

    fn show(&self) -> String {
        let pairs: Vec<String> = self.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let has_spaces = self.iter().any(|(_, value)| value.contains(char::is_whitespace));
        if has_spaces { pairs.join("\n") + "\n" } else { pairs.join(" ") }
    }
}

public_setting!(NcclEnv);
