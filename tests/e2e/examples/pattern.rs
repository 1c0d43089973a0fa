//! Compares output with the pattern in a README.
//!
//! `…` matches any text within a line, and alone any number of lines. `<name>` matches a text without spaces. It is the same for all uses
//! of that name in the README, and differs from that of every other name.

use std::collections::BTreeMap;

/// The texts of the names.
pub(crate) type Names = BTreeMap<String, String>;

const ANYTHING: char = '…';
/// Texts in angle brackets that kubectl prints itself.
const LITERAL: [&str; 3] = ["none", "unset", "unknown"];

enum Token<'a> {
    Text(&'a str),
    Anything,
    Name(&'a str),
}

/// The names, extended by this match; `None` if the output does not match.
pub(crate) fn matches(expected: &[String], printed: &[&str], names: &Names) -> Option<Names> {
    let Some((first, rest)) = expected.split_first() else {
        return printed.is_empty().then(|| names.clone());
    };
    if first.trim() == ANYTHING.to_string() {
        return (0..=printed.len()).find_map(|skipped| matches(rest, &printed[skipped..], names));
    }
    let (line, others) = printed.split_first()?;
    line_matches(&tokens(first.trim_end()), line.trim_end(), names, &mut |names| {
        matches(rest, others, names)
    })
}

fn tokens(line: &str) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    let mut rest = line;
    while !rest.is_empty() {
        if let Some(after) = rest.strip_prefix(ANYTHING) {
            tokens.push(Token::Anything);
            rest = after;
        } else if let Some((name, after)) = name_at_the_start(rest) {
            tokens.push(Token::Name(name));
            rest = after;
        } else {
            let end = rest
                .char_indices()
                .skip(1)
                .find(|(at, character)| *character == ANYTHING || name_at_the_start(&rest[*at..]).is_some())
                .map_or(rest.len(), |(at, _)| at);
            tokens.push(Token::Text(&rest[..end]));
            rest = &rest[end..];
        }
    }
    tokens
}

fn name_at_the_start(text: &str) -> Option<(&str, &str)> {
    let (name, after) = text.strip_prefix('<')?.split_once('>')?;
    let is_name = !name.is_empty() && name.chars().all(|c| c.is_ascii_lowercase() || c == '-');
    (is_name && !LITERAL.contains(&name)).then_some((name, after))
}

/// Tries every way to match a line until the rest matches too.
fn line_matches(
    expected: &[Token<'_>],
    line: &str,
    names: &Names,
    follows: &mut dyn FnMut(&Names) -> Option<Names>,
) -> Option<Names> {
    let Some((first, rest)) = expected.split_first() else {
        return if line.is_empty() { follows(names) } else { None };
    };
    match first {
        Token::Text(text) => line_matches(rest, line.strip_prefix(text)?, names, follows),
        Token::Anything => line
            .char_indices()
            .map(|(at, _)| at)
            .chain([line.len()])
            .find_map(|at| line_matches(rest, &line[at..], names, follows)),
        Token::Name(name) => {
            if let Some(known) = names.get(*name) {
                return line_matches(rest, line.strip_prefix(known.as_str())?, names, follows);
            }
            let word = line.find(char::is_whitespace).unwrap_or(line.len());
            let ends = line[..word].char_indices().map(|(at, _)| at).chain([word]);
            ends.skip(1).find_map(|end| {
                let text = &line[..end];
                if names.values().any(|other| other == text) {
                    return None;
                }
                let mut names = names.clone();
                names.insert((*name).to_owned(), text.to_owned());
                line_matches(rest, &line[end..], &names, follows)
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fits(expected: &str, printed: &str) -> Option<Names> {
        let expected: Vec<String> = expected.lines().map(str::to_owned).collect();
        let printed: Vec<&str> = printed.lines().collect();
        matches(&expected, &printed, &Names::new())
    }

    #[test]
    fn text_is_compared_word_by_word_but_for_spaces_at_the_end() {
        assert!(fits("a b\nc", "a b  \nc").is_some());
        assert!(fits("a b", "a  b").is_none());
        assert!(fits("a", "a\nb").is_none());
        assert!(fits("a\nb", "a").is_none());
        assert!(fits("<none>", "something").is_none());
    }

    #[test]
    fn dots_stand_for_anything_within_a_line_or_for_lines() {
        assert!(fits("pod-… runs", "pod-x7 runs").is_some());
        assert!(fits("pod-… runs", "pod-x7 waits").is_none());
        assert!(fits("a\n…\nb", "a\n1\n2\nb").is_some());
        assert!(fits("a\n…\nb", "a\nb").is_some());
        assert!(fits("a\n…\nb", "a\n1").is_none());
    }

    #[test]
    fn a_name_stands_for_one_text_and_no_other_name_for_the_same() {
        let names = fits("/dev/<device> on <node>\n<device>", "/dev/x-1 on y\nx-1").expect("it fits");
        assert_eq!(names["device"], "x-1");
        assert!(fits("<device>\n<device>", "x\ny").is_none());
        assert!(fits("<one>\n<other>", "x\nx").is_none());
        assert!(fits("<one>\n<other>", "x\ny").is_some());
        assert!(fits("<one>", "two words").is_none());
        assert!(fits("<one>", "").is_none());
        // Names of earlier commands apply to later ones.
        assert!(matches(&["<device>".to_owned()], &["z"], &names).is_none());
    }

    #[test]
    fn all_ways_to_match_are_tried() {
        assert!(fits("<a>-device…x\n<a>", "p-device-device-1x\np-device").is_some());
        assert!(fits("…\n<a>\n<a>", "1\n2\n3\n3").is_some());
    }
}
