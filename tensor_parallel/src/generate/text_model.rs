//! A model with its tokenizer, from text to text.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use ryzanstein_process_group::DType;

use super::{ChatError, ChatTemplate, ChatTime, GenerateOptions, Message, TextStream, Tokenizer};
use crate::error::{Error, Result};
use crate::model::{Llama, ModelGroups, broadcast, check_all_ranks};

/// One rank's shard of a model, with the tokenizer and the chat template of its folder.
#[derive(Debug)]
pub struct TextModel {
    model: Arc<Llama>,
    text: TextFiles,
}

/// The tokenizer and the chat template.
#[derive(Debug)]
struct TextFiles {
    tokenizer: Tokenizer,
    /// The template, or its error: the model then still completes text.
    chat: Result<ChatTemplate, ChatError>,
}

impl TextFiles {
    /// Opens the files of a folder. Also returns a digest of both.
    fn open(folder: &Path) -> Result<(Self, u64)> {
        let tokenizer = Tokenizer::open(folder)?.ok_or_else(|| {
            Error::input(format!(
                "{} has no tokenizer.json, so the model knows no text; use `Llama::load` and token ids",
                folder.display()
            ))
        })?;
        let chat = match ChatTemplate::open(folder) {
            Ok(template) => Ok(template),
            Err(Error::Chat(error)) => Err(error),
            Err(error) => return Err(error),
        };
        let digest = tokenizer.digest() ^ chat.as_ref().map_or(0, ChatTemplate::digest);
        Ok((Self { tokenizer, chat }, digest))
    }
}

impl TextModel {
    /// Loads a model from a folder; see [`Llama::load`].
    ///
    /// # Errors
    /// Returns the errors of [`Llama::load`], and an error if the folder has no tokenizer.
    pub fn load(folder: &Path, dtype: Option<DType>, groups: &mut dyn ModelGroups) -> Result<Self> {
        let open = || TextFiles::open(folder);
        let (model, text) = Llama::load_and(folder, dtype, groups, |_, _| {}, open)?;
        Ok(Self { model: Arc::new(model), text })
    }

    /// Returns the model.
    pub fn model(&self) -> &Arc<Llama> {
        &self.model
    }

    /// Returns the tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.text.tokenizer
    }

    /// Returns the chat template.
    ///
    /// # Errors
    /// Returns the error of loading the template.
    pub fn chat_template(&self) -> Result<&ChatTemplate, ChatError> {
        self.text.chat.as_ref().map_err(Clone::clone)
    }

    /// Completes `prompt`, up to an end token or the first of the model's stop strings. Every rank passes the same arguments
    /// and returns the same text.
    ///
    /// # Errors
    /// Returns the errors of [`Llama::generate`]. If the tokenizer fails on one rank, all fail.
    pub fn complete(
        &self,
        prompt: &str,
        options: &GenerateOptions,
        groups: &mut dyn ModelGroups,
    ) -> Result<String> {
        self.follow(self.tokenizer().encode(prompt), options, groups)
    }

    /// Answers the messages of a chat. Every rank passes the same arguments and returns the same text. A template that uses the
    /// date gets that of the first rank.
    ///
    /// # Errors
    /// Returns the errors of [`complete`](Self::complete). If the model has no chat template, or rejects the messages of one
    /// rank, all fail.
    pub fn chat(
        &self,
        messages: &[Message],
        options: &GenerateOptions,
        groups: &mut dyn ModelGroups,
    ) -> Result<String> {
        let now = broadcast(&ChatTime::now(), groups)?;
        let render = || self.tokenizer().encode_raw(&self.chat_template()?.render(messages, now)?);
        self.follow(render(), options, groups)
    }

    fn follow(
        &self,
        prompt: Result<Vec<u32>>,
        options: &GenerateOptions,
        groups: &mut dyn ModelGroups,
    ) -> Result<String> {
        let prompt = check_all_ranks(prompt, groups)?;
        let stop = if options.ignore_end { &[][..] } else { &self.model.config().stop_strings };
        let mut text = TextStream::new(self.tokenizer(), &prompt, stop);
        let (mut answer, mut failed) = (String::new(), None);
        self.model.generate_with(&prompt, options, groups, |token| {
            match text.push(token) {
                Ok(new) => answer += &new,
                Err(error) => failed = Some(error),
            }
            if text.is_ended() || failed.is_some() {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })?;
        match failed {
            Some(error) => Err(error),
            None => Ok(answer + &text.finish()?),
        }
    }
}

#[cfg(test)]
mod tests {
    use ryzanstein_process_group::Rank;
    use serde_json::json;

    use super::*;
    use crate::error::{ConfigurationError, RequestError};
    use crate::testing::{fixture, on_loopback};

    /// Creates the fixture with a tokenizer of a hundred words that marks spaces, as in Llama 2 and Mistral.
    fn words() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(fixture("llama-mha").join(file), folder.path().join(file)).unwrap();
        }
        let vocab: serde_json::Map<_, _> = (0..100).map(|id| (format!("▁w{id}"), json!(id))).collect();
        let space =
            json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true });
        let tokenizer = json!({
            "version": "1.0", "added_tokens": [], "pre_tokenizer": space, "decoder": space,
            "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "▁w0" },
        });
        std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let template = "{{ strftime_now('w%-d w%-m') }}{% for m in messages %} {{ m.content }}{% endfor %}";
        std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
        folder
    }

    fn options() -> GenerateOptions {
        GenerateOptions { max_new_tokens: 5, ignore_end: true, ..GenerateOptions::default() }
    }

    #[test]
    fn the_first_word_of_a_completion_keeps_its_space() {
        let folder = words();
        let texts = on_loopback(2, |group| {
            let model = TextModel::load(folder.path(), None, group).unwrap();
            let prompt = model.tokenizer().encode("w3 w4").unwrap();
            let tokens = model.model().generate(&prompt, &options(), group).unwrap().tokens;
            let words: Vec<String> = tokens.iter().map(|id| format!(" w{id}")).collect();
            (model.complete("w3 w4", &options(), group).unwrap(), words.concat())
        });
        assert!(texts.iter().all(|(text, words)| text == words && text.starts_with(" w")), "{texts:?}");
    }

    #[test]
    fn a_text_ends_before_the_stop_strings_of_the_model_unless_ends_are_ignored() {
        let folder = words();
        let whole = on_loopback(2, |group| {
            TextModel::load(folder.path(), None, group).unwrap().complete("w3 w4", &options(), group).unwrap()
        });
        let third = whole[0].split(' ').nth(3).unwrap();
        let generation = json!({ "stop_strings": [third, "no such text"] });
        std::fs::write(folder.path().join("generation_config.json"), generation.to_string()).unwrap();
        let texts = on_loopback(2, |group| {
            let model = TextModel::load(folder.path(), None, group).unwrap();
            let ending = GenerateOptions { ignore_end: false, ..options() };
            [&ending, &options()].map(|options| model.complete("w3 w4", options, group).unwrap())
        });
        let before = &whole[0][..whole[0].find(third).unwrap()];
        assert!(texts.iter().all(|texts| *texts == [before, &whole[0]]), "{texts:?} of {whole:?}");
    }

    #[test]
    fn a_chat_has_the_same_answer_on_every_rank() {
        let folder = words();
        let answers = on_loopback(2, |group| {
            let model = TextModel::load(folder.path(), None, group).unwrap();
            model.chat(&[Message::user("w9")], &options(), group).unwrap()
        });
        assert_eq!(answers[0], answers[1]);
    }

    #[test]
    fn messages_that_one_rank_cannot_render_fail_all_and_the_group_stays_usable() {
        let folder = words();
        let template = "{{ raise_exception('no') if messages[0].content == 'bad' else messages[0].content }}";
        std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
        let outcomes = on_loopback(2, |group| {
            let model = TextModel::load(folder.path(), None, group).unwrap();
            let text = ["w9", "bad"][group.rank().index()];
            let error = model.chat(&[Message::user(text)], &options(), group).unwrap_err();
            (error, model.chat(&[Message::user("w9")], &options(), group).unwrap())
        });
        assert!(matches!(outcomes[0].0, Error::Peer { rank: Rank(1), .. }), "{}", outcomes[0].0);
        assert!(matches!(outcomes[1].0, Error::Chat(_)), "{}", outcomes[1].0);
    }

    #[test]
    fn a_model_without_a_template_completes_text_and_says_why_it_does_not_chat() {
        let folder = words();
        std::fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
        for error in on_loopback(2, |group| {
            let model = TextModel::load(folder.path(), None, group).unwrap();
            model.complete("w3", &options(), group).unwrap();
            model.chat(&[Message::user("w9")], &options(), group).unwrap_err()
        }) {
            assert!(matches!(error, Error::Chat(ChatError::NoTemplate(_))), "{error}");
        }
    }

    #[test]
    fn prompts_or_options_that_differ_are_refused_on_every_rank_and_the_group_stays_usable() {
        let folder = words();
        for (errors, texts) in on_loopback(2, |group| {
            let model = TextModel::load(folder.path(), None, group).unwrap();
            let me = group.rank().index();
            let prompt = ["w3 w4", "w3 w5"][me];
            let more = GenerateOptions { max_new_tokens: 5 + me, ..options() };
            let errors = [
                model.complete(prompt, &options(), group).unwrap_err().to_string(),
                model.complete("w3", &more, group).unwrap_err().to_string(),
            ];
            (errors, model.complete("w3", &options(), group).unwrap())
        }) {
            assert!(errors[0].contains("rank 1 passed a prompt other than rank 0's"), "{errors:?}");
            assert!(errors[1].contains("rank 1 passed options other than rank 0's"), "{errors:?}");
            assert!(!texts.is_empty());
        }
        let several =
            RequestError::Different { what: "a prompt", first: Rank(0), ranks: vec![Rank(1), Rank(3)] };
        assert!(several.to_string().starts_with("ranks 1, 3 passed"), "{several}");
    }

    #[test]
    fn a_rank_whose_tokenizer_is_missing_or_another_fails_all() {
        let (good, bad) = (words(), words());
        let load = || {
            on_loopback(2, |group| {
                let folder = if group.rank() == Rank(1) { &bad } else { &good };
                TextModel::load(folder.path(), None, group).unwrap_err()
            })
        };
        let differ =
            |error: &Error| matches!(error, Error::Configuration(ConfigurationError::DifferentModels { .. }));
        std::fs::write(bad.path().join("chat_template.jinja"), "another").unwrap();
        assert!(load().iter().all(differ));
        std::fs::copy(fixture("llama-mha/tokenizer.json"), bad.path().join("tokenizer.json")).unwrap();
        assert!(load().iter().all(differ));
        std::fs::remove_file(bad.path().join("tokenizer.json")).unwrap();
        let errors = load();
        assert!(matches!(errors[0], Error::Peer { rank: Rank(1), .. }), "{}", errors[0]);
        assert!(errors.iter().all(|error| error.to_string().contains("has no tokenizer.json")), "{errors:?}");
    }
}
