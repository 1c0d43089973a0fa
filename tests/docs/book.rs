//! Detects markup that mdBook would warn about, because `make check` does not build mdBook.

use pulldown_cmark::{Event, Options, Parser, Tag};

use crate::page::pages;

/// Lines with markup that mdBook 0.5 can warn about: HTML (not closed, or closed twice), footnotes (undefined, or unused) and mdBook's own
/// directives such as `{{#include}}` (of a missing file). No page needs any of these.
fn suspicious_markup(text: &str) -> Vec<(usize, String)> {
    let line = |offset: usize| text[..offset].matches('\n').count() + 1;
    let options = Options::ENABLE_TABLES | Options::ENABLE_FOOTNOTES;
    let markup = Parser::new_ext(text, options)
        .into_offset_iter()
        .filter_map(|(event, range)| {
            let is_doubtful = match event {
                Event::Html(html) | Event::InlineHtml(html) => {
                    // A comment that ends on the same line.
                    let html = html.trim();
                    !(html.starts_with("<!--") && html.ends_with("-->"))
                }
                Event::FootnoteReference(_) | Event::Start(Tag::FootnoteDefinition(_)) => true,
                _ => false,
            };
            is_doubtful.then(|| (line(range.start), text[range].trim().to_owned()))
        });
    // mdBook processes these in code blocks too.
    let directives = text
        .match_indices("{{#")
        .map(|(offset, directive)| (line(offset), directive.to_owned()));
    markup.chain(directives).collect()
}

#[test]
fn no_page_of_the_book_has_markup_that_mdbook_warns_about() {
    let mut found = Vec::new();
    let book = pages().into_iter().filter(|page| page.path.starts_with("docs"));
    for page in book {
        for (line, markup) in suspicious_markup(&page.text) {
            found.push(format!("{}:{line}: {markup}", page.path.display()));
        }
    }
    assert!(found.is_empty(), "write it without:\n  {}", found.join("\n  "));
}

#[test]
fn each_sort_of_markup_is_found_on_its_line_and_code_is_none() {
    let fine = "`<driver>` and 1 < 2 > 0, [a](b.md), {{ .Values.x }}\n\n<!-- end of it -->\n\n```yaml\na: <b>\n```\n";
    assert_eq!(suspicious_markup(fine), []);
    for (text, line) in [
        ("one\n\na <driver> name", 3),
        ("<details>\n", 1),
        ("one\ntwo</b>", 2),
        ("one[^a]\n\n[^a]: b", 1),
        ("one\n\n[^a]: never named", 3),
        ("```sh\n{{#include nothing.sh}}\n```", 2),
    ] {
        assert_eq!(
            suspicious_markup(text).first().map(|found| found.0),
            Some(line),
            "{text}"
        );
    }
}
