# Completes commands, flags and their choices of instep in bash, and in zsh, from the help of the installed version.
if [[ -n ${ZSH_VERSION-} ]]; then
    autoload -Uz compinit bashcompinit && compinit && bashcompinit
fi

_instep() {
    local command=${COMP_WORDS[1]} word=$2 before=$3 topic= help words=
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        words=$("$1" --help | sed -n 's/^  \([a-z]*\)  .*/\1/p')
    elif [[ $command == run && " ${COMP_WORDS[*]:0:$COMP_CWORD}" == *.py* ]]; then
        return # the script's own arguments
    else
        if [[ $command == bench || $command == plan ]] && ((COMP_CWORD > 2)); then topic=${COMP_WORDS[2]}; fi
        help=$("$1" "$command" ${topic:+"$topic"} --help 2> /dev/null)
        if [[ $word == -* ]]; then
            words=$(grep -oE -e '--[a-z0-9]+([.-][a-z0-9]+)*' <<< "$help")
        else
            words=$(grep -oE -e "(^| )$before (\[-h\] )?\{[^}]*" <<< "$help" | sed 's/.*{//' | tr , ' ')
        fi
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _instep instep
