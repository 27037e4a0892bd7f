//! Incremental decoding of generated tokens.

use std::ops::Range;

use super::Tokenizer;
use crate::error::Result;

/// Number of tokens of the prompt that the first new token is decoded with: enough for a correct space.
const CONTEXT: usize = 8;
/// Maximum number of tokens of a part of a character.
const PARTIAL: usize = 3;

/// Decodes tokens to text incrementally.
///
/// A token may be a part of a character, and a leading space may depend on its neighbours. So the stream decodes a token together
/// with the preceding ones, and returns text once its characters are complete. It holds back text that may be the beginning of a
/// stop string. Special tokens are not part of the text, but stop strings find them.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    tokens: Vec<u32>,
    /// Index of the first token that the next one is decoded with.
    context: usize,
    /// Number of tokens whose text has been returned or held back.
    decoded: usize,
    stop: Vec<String>,
    /// Text that may be the beginning of a stop string.
    held: String,
    /// The special tokens in `held`, which are not returned.
    hidden: Vec<Range<usize>>,
    ended: bool,
}

impl<'a> TextStream<'a> {
    /// Creates a stream of the text after `prompt`. The stream ends before the first of the `stop` strings.
    pub fn new(tokenizer: &'a Tokenizer, prompt: &[u32], stop: &[String]) -> Self {
        let is_whole = |window: &Range<usize>| {
            let window = &prompt[window.clone()];
            // The prompt may contain U+FFFD itself, whose tokens are not those of a part of a character. A space may precede them.
            let is_its_own = |text: &str| {
                let tokens = tokenizer.encode_raw(text).unwrap_or_default();
                tokens == window || tokens.get(1..) == Some(window)
            };
            let text = tokenizer.decode(window);
            text.is_ok_and(|text| {
                let is_clean = !text.starts_with(char::REPLACEMENT_CHARACTER)
                    && !text.ends_with(char::REPLACEMENT_CHARACTER);
                is_clean || is_its_own(&text)
            })
        };
        // The context begins and ends with whole characters: `ByteFallback` decodes each byte beside a partial one as U+FFFD.
        let first = prompt.len().saturating_sub(CONTEXT + PARTIAL);
        let ends = (0..=PARTIAL).map(|partial| prompt.len().saturating_sub(partial));
        let mut windows = ends.flat_map(|end| (first..end.max(1)).map(move |start| start..end));
        let window = windows.find(is_whole).unwrap_or(first..prompt.len());
        let stop = stop.iter().filter(|text| !text.is_empty()).cloned().collect();
        Self {
            tokenizer,
            context: 0,
            decoded: window.len(),
            tokens: prompt[window.start..].to_vec(),
            stop,
            held: String::new(),
            hidden: Vec::new(),
            ended: false,
        }
    }

    /// Adds a token. Returns the text that is final now.
    ///
    /// # Errors
    /// Returns an error if the tokenizer fails.
    pub fn push(&mut self, token: u32) -> Result<String> {
        self.tokens.push(token);
        let new = self.decode_new()?;
        let mut released = String::new();
        let special = self.tokenizer.special_token(token);
        let ends_whole = !new.ends_with(char::REPLACEMENT_CHARACTER);
        // The next token may complete a character, unless this one is special and a stop string may find it.
        if !new.is_empty() && (ends_whole || (special.is_some() && !self.stop.is_empty())) {
            self.context = self.decoded;
            self.decoded = self.tokens.len();
            released = self.release(&new);
        }
        if let Some(special) = special {
            self.hidden.push(self.held.len()..self.held.len() + special.len());
            released += &self.release(special);
        }
        Ok(released)
    }

    /// Returns true if a stop string has been found. No more text follows.
    pub fn is_ended(&self) -> bool {
        self.ended
    }

    /// Returns the rest of the text, after the last token.
    ///
    /// # Errors
    /// Returns an error if the tokenizer fails.
    pub fn finish(mut self) -> Result<String> {
        let new = self.decode_new()?;
        let released = self.release(&new);
        let rest = self.take(self.held.len());
        Ok(released + &rest)
    }

    /// Decodes the tokens from `decoded` on.
    fn decode_new(&self) -> Result<String> {
        let before = self.tokenizer.decode(&self.tokens[self.context..self.decoded])?;
        let all = self.tokenizer.decode(&self.tokens[self.context..])?;
        match all.strip_prefix(&before) {
            Some(new) => Ok(new.into()),
            // A part of a character at the end changes the decoding of the bytes before it.
            None => self.tokenizer.decode(&self.tokens[self.decoded..]),
        }
    }

    /// Adds text. Returns the text that cannot be a part of a stop string.
    fn release(&mut self, new: &str) -> String {
        if self.ended {
            return String::new();
        }
        self.held += new;
        let found = self.stop.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        if let Some(at) = found {
            self.ended = true;
            let before = self.take(at);
            self.held.clear();
            return before;
        }
        let may_begin = |tail: &str| self.stop.iter().any(|stop| stop.starts_with(tail));
        let from = self.held.char_indices().map(|(at, _)| at).find(|at| may_begin(&self.held[*at..]));
        self.take(from.unwrap_or(self.held.len()))
    }

    /// Takes held text up to an index, without the special tokens.
    fn take(&mut self, end: usize) -> String {
        let rest = self.held.split_off(end);
        let mut text = std::mem::replace(&mut self.held, rest);
        for hidden in self.hidden.iter().rev() {
            text.replace_range(hidden.start.min(end)..hidden.end.min(end), "");
        }
        self.hidden.retain(|hidden| hidden.end > end);
        for hidden in &mut self.hidden {
            *hidden = hidden.start.saturating_sub(end)..hidden.end - end;
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Creates a tokenizer whose tokens are single bytes, as in GPT-2 and its successors, and special tokens from number 256 on.
    fn bytes(special: &[&str]) -> Tokenizer {
        let alphabet = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
        let mut letters: Vec<char> = alphabet.into_iter().collect();
        letters.sort_unstable();
        let vocab: serde_json::Map<String, serde_json::Value> =
            letters.iter().enumerate().map(|(id, letter)| (letter.to_string(), id.into())).collect();
        let level = serde_json::json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false
        });
        let model = serde_json::json!({ "type": "BPE", "vocab": vocab, "merges": [] });
        let added = special.iter().zip(256..).map(|(content, id)| {
            serde_json::json!({
                "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": true
            })
        });
        let added: Vec<_> = added.collect();
        tokenizer(&serde_json::json!({
            "version": "1.0", "added_tokens": added, "pre_tokenizer": level, "decoder": level, "model": model
        }))
    }

    /// Creates a tokenizer of whole words that marks spaces, as in Llama 2 and Mistral.
    fn words() -> Tokenizer {
        let space = serde_json::json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true });
        let vocab = serde_json::json!({ "<unk>": 0, "▁Paris": 1, "▁is": 2, "▁big": 3, "ger": 4 });
        let model = serde_json::json!({ "type": "WordLevel", "vocab": vocab, "unk_token": "<unk>" });
        tokenizer(&serde_json::json!({
            "version": "1.0", "added_tokens": [], "pre_tokenizer": space, "decoder": space, "model": model
        }))
    }

    /// Creates a tokenizer of letters and, for other characters, their bytes, as in Llama 2.
    fn byte_fallback() -> Tokenizer {
        let letters = ["<unk>", "a", "!"].map(String::from);
        let tokens = (0..=255_u8).map(|byte| format!("<0x{byte:02X}>")).chain(letters);
        let vocab: serde_json::Map<String, serde_json::Value> =
            tokens.zip(0..).map(|(token, id)| (token, id.into())).collect();
        let model = serde_json::json!({
            "type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>", "byte_fallback": true
        });
        let decoders = serde_json::json!([{ "type": "ByteFallback" }, { "type": "Fuse" }]);
        tokenizer(&serde_json::json!({
            "version": "1.0", "added_tokens": [], "decoder": { "type": "Sequence", "decoders": decoders }, "model": model
        }))
    }

    fn tokenizer(json: &serde_json::Value) -> Tokenizer {
        Tokenizer::from_bytes("tokenizer.json".as_ref(), json.to_string().into_bytes()).unwrap()
    }

    fn streamed(tokenizer: &Tokenizer, prompt: &[u32], tokens: &[u32], stop: &[&str]) -> Vec<String> {
        let stop: Vec<String> = stop.iter().map(ToString::to_string).collect();
        let mut stream = TextStream::new(tokenizer, prompt, &stop);
        let mut pieces = Vec::new();
        for token in tokens {
            pieces.push(stream.push(*token).unwrap());
            if stream.is_ended() {
                break;
            }
        }
        pieces.push(stream.finish().unwrap());
        pieces
    }

    #[test]
    fn a_character_of_several_tokens_comes_when_it_is_whole() {
        for tokenizer in [bytes(&[]), byte_fallback()] {
            let tokens = tokenizer.encode("é€!").unwrap();
            assert_eq!(streamed(&tokenizer, &[], &tokens, &[]), ["", "é", "", "", "€", "!", ""]);
        }
    }

    #[test]
    fn half_a_character_at_the_end_is_shown_as_what_it_is() {
        for tokenizer in [bytes(&[]), byte_fallback()] {
            let tokens = tokenizer.encode("é€").unwrap();
            assert_eq!(streamed(&tokenizer, &[], &tokens[..3], &[]).concat(), "é\u{fffd}");
        }
    }

    #[test]
    fn a_prompt_may_end_with_a_replacement_character() {
        for tokenizer in [bytes(&[]), byte_fallback()] {
            for text in ["aa\u{fffd}", "\u{fffd}"] {
                let (prompt, new) = (tokenizer.encode(text).unwrap(), tokenizer.encode("a€").unwrap());
                assert_eq!(streamed(&tokenizer, &prompt, &new, &[]).concat(), "a€", "{text}");
            }
        }
    }

    #[test]
    fn the_first_word_behind_a_prompt_keeps_its_space() {
        assert_eq!(streamed(&words(), &[1], &[2, 3, 4], &[]), [" is", " big", "ger", ""]);
        assert_eq!(streamed(&words(), &[], &[1, 2], &[]).concat(), "Paris is");
    }

    #[test]
    fn a_stop_string_over_several_tokens_ends_the_text_before_it() {
        let tokenizer = bytes(&[]);
        let tokens = tokenizer.encode("one\n\nQ: two").unwrap();
        assert_eq!(streamed(&tokenizer, &[], &tokens, &["\n\nQ:"]).concat(), "one");
        assert_eq!(streamed(&tokenizer, &[], &tokens, &["never"]).concat(), "one\n\nQ: two");
        assert_eq!(streamed(&tokenizer, &[], &tokens, &["two and more"]).concat(), "one\n\nQ: two");
    }

    #[test]
    fn a_stop_string_finds_special_tokens_which_are_no_text() {
        let tokenizer = bytes(&["<|end|>", "<|call|>"]);
        let streamed = |text: &str, stop: &[&str]| {
            streamed(&tokenizer, &[], &tokenizer.encode(text).unwrap(), stop).concat()
        };
        assert_eq!(streamed("one<|end|>two", &["<|end|>"]), "one");
        assert_eq!(streamed("one<|end|>two", &["<|call|>"]), "onetwo");
        assert_eq!(streamed("a<|call|>b<|end|>\nc", &["<|end|>\n"]), "ab");
        assert_eq!(streamed("a<|call|>b", &["ab"]), "ab");
        assert_eq!(streamed("é<|call|><|end|>€", &["d|>€"]), "é");
        assert_eq!(streamed("a<|end|>", &["<|end|>more"]), "a");
    }

    #[test]
    fn half_a_character_before_a_special_token_that_is_a_stop_string_is_shown() {
        let tokenizer = bytes(&["<|end|>"]);
        let mut tokens = tokenizer.encode("aé<|end|>").unwrap();
        tokens.remove(2);
        for stop in ["<|end|>", "d|>"] {
            let text = streamed(&tokenizer, &[], &tokens, &[stop]).concat();
            assert!(text.starts_with("a\u{fffd}"), "{stop}: {text}");
        }
    }

    proptest! {
        #[test]
        fn special_tokens_are_no_text(text in "([abé]|<e>|<é>){0,8}", stop in "([abé]|<e>|<é>|e>){0,2}") {
            let tokenizer = bytes(&["<e>", "<é>"]);
            let tokens = tokenizer.encode(&text).unwrap();
            let whole = if stop.is_empty() { &text[..] } else { text.split(&stop).next().unwrap() };
            // A stop string may begin inside a special token, which is left out altogether.
            let whole = whole.replace("<e>", "").replace("<é>", "").replace('<', "");
            prop_assert_eq!(streamed(&tokenizer, &[], &tokens, &[&stop]).concat(), whole);
        }

        #[test]
        fn pieces_are_the_text_whatever_it_is(text in "[abé]{0,12}", stop in "[abé]{0,2}") {
            let tokenizer = bytes(&[]);
            let tokens = tokenizer.encode(&text).unwrap();
            let whole = if stop.is_empty() { &text[..] } else { text.split(&stop).next().unwrap() };
            prop_assert_eq!(streamed(&tokenizer, &[], &tokens, &[&stop]).concat(), whole);
        }

        #[test]
        fn a_prompt_may_end_inside_a_character(text in "[aé€😀]{0,16}", at in 0usize..64) {
            for tokenizer in [bytes(&[]), byte_fallback()] {
                let tokens = tokenizer.encode(&text).unwrap();
                let (prompt, new) = tokens.split_at(at.min(tokens.len()));
                // A character that begins in the prompt is returned completely.
                let before = text.char_indices().map(|(at, _)| at).take_while(|at| *at <= prompt.len()).last();
                let before = if prompt.len() == text.len() { text.len() } else { before.unwrap_or(0) };
                prop_assert_eq!(streamed(&tokenizer, prompt, new, &[]).concat(), &text[before..]);
            }
        }
    }
}
