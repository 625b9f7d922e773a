//! Splits a shell script into simple commands. Nothing is run or expanded.

/// Characters that a shell replaces outside of quotes, and the beginning of a comment.
const EXPANDED: &str = "$`*?[]{}~#";

/// The words of each simple command in a script, without quotes and redirections.
///
/// # Errors
/// A shell would expand a part of the script, or a quotation mark has no end. The error says which.
pub(super) fn commands(script: &str) -> Result<Vec<Vec<String>>, String> {
    let (mut commands, mut command, mut word) = (Vec::new(), Vec::new(), None::<String>);
    // True if the next word is the file or the descriptor of a redirection.
    let mut is_target = false;
    let mut characters = script.chars().peekable();
    while let Some(character) = characters.next() {
        match character {
            '\'' | '"' => quoted(character, &mut characters, word.get_or_insert_default())?,
            '\\' => match characters.next() {
                Some('\n') | None => {}
                Some(next) => word.get_or_insert_default().push(next),
            },
            ' ' | '\t' | '\n' | ';' | '&' | '|' | '(' | ')' | '<' | '>' => {
                let is_redirection = matches!(character, '<' | '>');
                // Digits before a redirection are the number of a descriptor.
                let is_number = |word: &String| is_redirection && word.bytes().all(|byte| byte.is_ascii_digit());
                if let Some(word) = word.take().filter(|word| !is_number(word))
                    && !std::mem::take(&mut is_target)
                {
                    command.push(word);
                }
                if is_redirection {
                    while characters.next_if(|next| "<>&|".contains(*next)).is_some() {}
                    is_target = true;
                } else if !matches!(character, ' ' | '\t') && (character != '&' || characters.peek() != Some(&'>')) {
                    commands.push(std::mem::take(&mut command));
                    is_target = false;
                }
            }
            _ if EXPANDED.contains(character) => return Err(expanded(character)),
            _ => word.get_or_insert_default().push(character),
        }
    }
    command.extend(word.filter(|_| !is_target));
    commands.push(command);
    Ok(commands)
}

/// Reads up to the end of a quotation.
fn quoted(mark: char, characters: &mut impl Iterator<Item = char>, word: &mut String) -> Result<(), String> {
    let end = || format!("the quotation mark {mark} has no end");
    loop {
        match characters.next().ok_or_else(end)? {
            character if character == mark => return Ok(()),
            character @ ('$' | '`') if mark == '"' => return Err(expanded(character)),
            '\\' if mark == '"' => match characters.next().ok_or_else(end)? {
                '\n' => {}
                character @ ('$' | '`' | '"' | '\\') => word.push(character),
                character => word.extend(['\\', character]),
            },
            character => word.push(character),
        }
    }
}

fn expanded(character: char) -> String {
    format!("only a shell can evaluate the character {character}")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn shown(script: &str) -> Vec<String> {
        let commands = commands(script).unwrap();
        commands.iter().filter(|words| !words.is_empty()).map(|words| words.join("|")).collect()
    }

    #[test]
    fn scripts_are_split_like_in_a_shell() {
        for (script, expected) in [
            ("exec a --b=c --d 1>>/var/log/a.log 2>&1", &["exec|a|--b=c|--d"][..]),
            ("mkfifo /p; (tee -a /l < /p & ) ; exec a --b > /p 2>&1", &["mkfifo|/p", "tee|-a|/l", "exec|a|--b"]),
            ("a --b=1 2>&1 | tee /l || c&&d", &["a|--b=1", "tee|/l", "c", "d"]),
            ("set -e\n a \\\n  --b", &["set|-e", "a|--b"]),
            ("a --b='x y $z' --c=\"x\\\"y\\z\" '' d\\ e", &["a|--b=x y $z|--c=x\"y\\z||d e"]),
            ("a >l --b >&- &>l --c 2> l;>l d", &["a|--b|--c", "d"]),
            ("a --v=2>l 3 4", &["a|--v=2|3|4"]),
        ] {
            assert_eq!(shown(script), expected, "{script}");
        }
    }

    #[test]
    fn scripts_that_only_a_shell_can_evaluate_are_refused() {
        for script in
            ["a $b", "a \"$b\"", "a `b`", "a *", "a [bc]", "a b?", "a ~/b", "a {b,c}", "a # b", "a 'b", "a \"b"]
        {
            assert!(commands(script).is_err(), "{script}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_script_makes_the_reader_panic(script in "[a-c0-9$`'\"\\\\<>&|;() \n-]{0,60}") {
            let _ = commands(&script);
        }
    }
}
