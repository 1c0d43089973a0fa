//! Which paths (`std::fs::File`) a source names, and where.

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// A path that is named in a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mention {
    /// Its segments. `crate`, `self` and `super` are resolved, so that a path within the crate begins with `crate`;
    /// a glob is a last segment `*`.
    pub(crate) segments: Vec<String>,
    /// Whether it stands in a `use` declaration.
    pub(crate) imported: bool,
    /// The line that it begins on, from 1.
    pub(crate) line: usize,
}

/// All paths that the tokens name, single names included. `module` is where the tokens stand: `["core", "node"]`.
pub(crate) fn mentions(tokens: TokenStream, module: &[String]) -> Vec<Mention> {
    let mut mentions = Vec::new();
    collect(tokens, module, &mut mentions);
    mentions
}

fn collect(tokens: TokenStream, module: &[String], mentions: &mut Vec<Mention>) {
    let tokens: Vec<_> = tokens.into_iter().collect();
    let mut rest = tokens.as_slice();
    while let [token, after @ ..] = rest {
        rest = match (token, after) {
            (TokenTree::Ident(word), [TokenTree::Ident(name), TokenTree::Group(body), after @ ..])
                if word == "mod" && body.delimiter() == Delimiter::Brace =>
            {
                let inner = [module, &[name.to_string()]].concat();
                collect(body.stream(), &inner, mentions);
                after
            }
            (TokenTree::Ident(word), _) if word == "use" => {
                path(skip_colons(after), &[], module, true, mentions)
            }
            (TokenTree::Ident(_), _) => path(rest, &[], module, false, mentions),
            (TokenTree::Group(group), _) => {
                collect(group.stream(), module, mentions);
                after
            }
            _ => after,
        };
    }
}

/// Reads one path, or one tree of a `use`, and returns what comes after it.
fn path<'a>(
    mut tokens: &'a [TokenTree],
    prefix: &[String],
    module: &[String],
    imported: bool,
    mentions: &mut Vec<Mention>,
) -> &'a [TokenTree] {
    let mut segments = prefix.to_vec();
    let line = tokens.first().map_or(0, |token| token.span().start().line);
    loop {
        match tokens {
            [TokenTree::Ident(segment), after @ ..] => {
                // `{self, Write}` names what stands before the braces.
                if segment != "self" || segments.is_empty() {
                    segments.push(segment.to_string().trim_start_matches("r#").to_owned());
                }
                tokens = after;
            }
            [TokenTree::Punct(star), after @ ..] if imported && star.as_char() == '*' => {
                segments.push("*".to_owned());
                tokens = after;
            }
            [TokenTree::Group(trees), after @ ..] if imported && trees.delimiter() == Delimiter::Brace => {
                let inner: Vec<_> = trees.stream().into_iter().collect();
                for tree in
                    inner.split(|token| matches!(token, TokenTree::Punct(comma) if comma.as_char() == ','))
                {
                    if !tree.is_empty() {
                        path(skip_colons(tree), &segments, module, imported, mentions);
                    }
                }
                return after;
            }
            _ => break,
        }
        let after = skip_colons(tokens);
        if after.len() == tokens.len() {
            break;
        }
        // What follows `::` is a further segment, or `<` of type arguments, which end the path.
        if !matches!(after, [TokenTree::Ident(_) | TokenTree::Group(_), ..])
            && !matches!(after, [TokenTree::Punct(star), ..] if star.as_char() == '*')
        {
            tokens = after;
            break;
        }
        tokens = after;
    }
    mentions.push(Mention {
        segments: resolve(segments, module),
        imported,
        line,
    });
    tokens
}

fn skip_colons(tokens: &[TokenTree]) -> &[TokenTree] {
    match tokens {
        [TokenTree::Punct(first), TokenTree::Punct(second), after @ ..]
            if first.as_char() == ':' && second.as_char() == ':' =>
        {
            after
        }
        _ => tokens,
    }
}

/// Makes a path that begins with `self` or `super` begin with `crate`.
fn resolve(segments: Vec<String>, module: &[String]) -> Vec<String> {
    let ups = segments
        .iter()
        .take_while(|segment| *segment == "super" || *segment == "self")
        .count();
    if ups == 0 || segments.len() == 1 && segments[0] == "self" {
        return segments;
    }
    let supers = segments[..ups]
        .iter()
        .filter(|segment| *segment == "super")
        .count();
    let kept = &module[..module.len().saturating_sub(supers)];
    [&["crate".to_owned()], kept, &segments[ups..]].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(source: &str) -> Vec<String> {
        let module = ["core".to_owned(), "prepare".to_owned()];
        let tokens = source.parse().expect("Rust");
        mentions(tokens, &module)
            .into_iter()
            .map(|mention| mention.segments.join("::"))
            .collect()
    }

    #[test]
    fn a_tree_of_imports_is_told_apart_into_its_paths() {
        let names = named("use std::{fs::{self, File}, collections::*, net};");

        assert_eq!(
            names,
            ["std::fs", "std::fs::File", "std::collections::*", "std::net"]
        );
    }

    #[test]
    fn paths_in_the_body_of_a_macro_are_seen() {
        assert!(named("fn f() { vec![Some(std::env::var(\"A\"))]; }").contains(&"std::env::var".to_owned()));
    }

    #[test]
    fn a_path_with_type_arguments_ends_before_them() {
        let names = named("type A = std::vec::Vec::<tokio::task::Id>;");

        assert!(names.contains(&"std::vec::Vec".to_owned()));
        assert!(names.contains(&"tokio::task::Id".to_owned()));
    }

    #[test]
    fn relative_paths_are_resolved_from_the_module_they_stand_in() {
        assert_eq!(named("use super::super::host;"), ["crate::host"]);
        assert_eq!(
            named("use self::prepared_claims::PreparedClaims;"),
            ["crate::core::prepare::prepared_claims::PreparedClaims"]
        );
        assert_eq!(
            named("mod tests { use super::super::devices; }"),
            ["crate::core::devices"]
        );
        assert_eq!(
            named("use super::{prepared_claims, super::host};"),
            ["crate::core::prepared_claims", "crate::host"]
        );
    }

    #[test]
    fn comments_documentation_and_texts_name_nothing() {
        let names =
            named("/// std::fs\n//! tokio\n// kube::Client\n/* std::net */ const A: u8 = b\"std::env\";");

        assert!(!names.iter().any(|name| name.contains("::")), "{names:?}");
    }

    #[test]
    fn a_mention_knows_its_line() {
        let tokens: TokenStream = "\n\nuse std::{\n    fs,\n};".parse().expect("Rust");

        assert_eq!(mentions(tokens, &[])[0].line, 4);
    }
}
