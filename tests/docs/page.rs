//! Parses pages of the documentation: blocks, links, headings and inline code.

#![allow(dead_code, reason = "each test program uses a part of this")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};

/// A code block.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    /// Position, such as `docs/install.md:30`.
    pub(crate) place: String,
    /// The first word after the fence.
    pub(crate) language: String,
    /// The second word, which selects the test.
    pub(crate) mark: String,
    pub(crate) text: String,
}

#[derive(Clone, Debug)]
pub(crate) struct Link {
    pub(crate) place: String,
    pub(crate) target: String,
}

/// Inline code in a sentence or a cell.
#[derive(Clone, Debug)]
pub(crate) struct Span {
    pub(crate) place: String,
    pub(crate) text: String,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Page {
    /// Relative to the root of the repository.
    pub(crate) path: PathBuf,
    pub(crate) text: String,
    pub(crate) blocks: Vec<Block>,
    pub(crate) links: Vec<Link>,
    pub(crate) spans: Vec<Span>,
    /// Anchors of the headings.
    pub(crate) anchors: BTreeSet<String>,
}

/// A path relative to the root of the repository.
pub(crate) fn repository(path: impl AsRef<Path>) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// A page by its path relative to the root of the repository.
pub(crate) fn page(path: &str) -> Page {
    let text = std::fs::read_to_string(repository(path)).expect("a page in UTF-8");
    parse(path, &text)
}

/// All pages: those in the root, the book, and the READMEs of the examples and of the test cluster.
pub(crate) fn pages() -> Vec<Page> {
    let mut paths = Vec::new();
    let mut directories = vec![
        PathBuf::from("docs"),
        "charts".into(),
        "examples".into(),
        "tests/cluster".into(),
    ];
    let is_page = |path: &Path| path.extension().is_some_and(|extension| extension == "md");
    for entry in std::fs::read_dir(repository("")).expect("the repository") {
        let path = PathBuf::from(entry.expect("an entry").file_name());
        if is_page(&path) {
            paths.push(path);
        }
    }
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(repository(&directory)).expect("a directory") {
            let path = directory.join(entry.expect("an entry").file_name());
            if repository(&path).is_dir() {
                directories.push(path);
            } else if is_page(&path) {
                paths.push(path);
            }
        }
    }
    paths.sort();
    assert!(paths.len() > 10, "{paths:?}");
    paths
        .iter()
        .map(|path| page(path.to_str().expect("UTF-8")))
        .collect()
}

/// Parses a page.
pub(crate) fn parse(path: &str, text: &str) -> Page {
    let mut page = Page {
        path: path.into(),
        text: text.to_owned(),
        ..Page::default()
    };
    let line = |offset: usize| text[..offset].matches('\n').count() + 1;
    let place = |offset: usize| format!("{path}:{}", line(offset));
    let mut heading: Option<String> = None;
    let mut block: Option<Block> = None;
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for (event, range) in Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter() {
        match event {
            Event::Start(Tag::CodeBlock(kind)) => {
                let info = match kind {
                    CodeBlockKind::Fenced(info) => info.to_string(),
                    CodeBlockKind::Indented => String::new(),
                };
                let mut words = info.split_whitespace().map(str::to_owned);
                block = Some(Block {
                    place: place(range.start),
                    language: words.next().unwrap_or_default(),
                    mark: words.next().unwrap_or_default(),
                    text: String::new(),
                });
            }
            Event::End(TagEnd::CodeBlock) => page.blocks.extend(block.take()),
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::End(TagEnd::Heading(_)) => {
                let anchor = anchor(&heading.take().unwrap_or_default());
                let count = counts.entry(anchor.clone()).or_default();
                page.anchors.insert(if *count == 0 {
                    anchor
                } else {
                    format!("{anchor}-{count}")
                });
                *count += 1;
            }
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => page.links.push(Link {
                place: place(range.start),
                target: dest_url.to_string(),
            }),
            Event::Text(words) => {
                if let Some(block) = &mut block {
                    block.text.push_str(&words);
                } else if let Some(heading) = &mut heading {
                    heading.push_str(&words);
                }
            }
            Event::Code(words) => {
                if let Some(heading) = &mut heading {
                    heading.push_str(&words);
                }
                page.spans.push(Span {
                    place: place(range.start),
                    text: words.to_string(),
                });
            }
            _ => {}
        }
    }
    page
}

/// The anchor that both GitHub and mdBook generate for a heading.
fn anchor(heading: &str) -> String {
    heading
        .trim()
        .chars()
        .filter_map(|c| match c {
            c if c.is_alphanumeric() || c == '_' || c == '-' => Some(c.to_ascii_lowercase()),
            c if c.is_whitespace() => Some('-'),
            _ => None,
        })
        .collect()
}

/// The concatenated blocks of a page with this language and mark.
pub(crate) fn script(path: &str, language: &str, mark: &str) -> String {
    let page = page(path);
    let blocks: Vec<String> = page
        .blocks
        .into_iter()
        .filter(|block| block.language == language && block.mark == mark)
        .map(|block| block.text)
        .collect();
    assert!(!blocks.is_empty(), "{path} has no block `{language} {mark}`");
    blocks.concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# One `two`, three\n\nA [link](a.md#b) and `code`.\n\n```sh run\nls\n```\n\n\
                        | a |\n|---|\n| `cell` |\n\n## Again\n\n## Again\n\n    indented\n";

    #[test]
    fn a_page_is_taken_apart_with_lines_and_anchors() {
        let page = parse("docs/a.md", TEXT);
        assert_eq!(
            page.anchors.iter().collect::<Vec<_>>(),
            ["again", "again-1", "one-two-three"]
        );
        let spans: Vec<_> = page
            .spans
            .iter()
            .map(|span| (span.place.as_str(), span.text.as_str()))
            .collect();
        assert_eq!(
            spans,
            [
                ("docs/a.md:1", "two"),
                ("docs/a.md:3", "code"),
                ("docs/a.md:11", "cell")
            ]
        );
        assert_eq!(page.links[0].target, "a.md#b");
        let blocks: Vec<_> = page
            .blocks
            .iter()
            .map(|block| (block.language.as_str(), block.mark.as_str(), block.text.as_str()))
            .collect();
        assert_eq!(blocks, [("sh", "run", "ls\n"), ("", "", "indented\n")]);
    }
}
