//! Common mistakes of users: each case must end with the right code and say what was wrong, where it came from and what
//! to do. None may panic, hang or take gigabytes of memory.

mod bench;
mod models;
mod settings;
mod support;

use support::check;

#[test]
fn wrong_flags_are_refused() {
    check(&settings::flags());
}

#[test]
fn programs_that_cannot_be_launched_are_refused() {
    check(&settings::programs());
}

#[test]
fn variables_without_a_meaning_are_refused() {
    check(&settings::variables());
}

#[test]
fn settings_files_that_are_none_are_refused() {
    check(&settings::files());
}

#[test]
fn settings_of_other_users_are_refused() {
    check(&settings::of_others());
}

#[test]
fn ranks_that_cannot_meet_are_refused() {
    check(&settings::joining());
}

#[test]
fn settings_of_models_that_cannot_be_are_refused() {
    check(&models::configs());
}

#[test]
fn what_is_no_file_of_a_likely_size_is_refused() {
    check(&models::no_files());
}

#[test]
fn weights_that_cannot_be_read_are_refused() {
    check(&models::weights());
}

#[test]
fn tensors_that_the_model_does_not_use_are_told_of_unless_they_never_matter() {
    check(&models::unused());
}

#[test]
fn settings_that_are_ignored_are_told_of() {
    check(&models::ignored());
}

#[test]
fn tokenizers_that_cannot_be_used_are_refused() {
    check(&models::tokenizers());
}

#[test]
fn chat_templates_that_take_too_much_are_refused() {
    check(&models::templates());
}

#[test]
fn prompts_that_the_model_cannot_take_are_refused() {
    check(&models::prompts());
}

#[test]
fn benchmarks_that_cannot_be_measured_are_refused() {
    check(&bench::cases());
}
